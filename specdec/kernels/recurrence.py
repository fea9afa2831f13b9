"""Kernels of recurrent layers between their projections; `kernels.reference` is the reference."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.recurrent.recurrence import (
    DeltaRule,
    HeadNorm,
    InputConvolution,
    LayerStates,
    ScanRule,
    TorchRecurrence,
)


class RecurrenceKernels(Protocol):
    """Kernels of rows of tokens, each with a state; a row's bits do not depend on others."""

    def replay(self, x: Tensor, states: LayerStates) -> Tensor:
        """Return the hidden states that a layer projects to inputs, and store those of guesses.

        x: [T, num_hidden], of the tokens of the pass; the result is x where tails are inputs.
        The plan's `of_hidden` finds those of the tokens.
        """
        ...

    def convolve(
        self, inputs: Tensor, convolution: InputConvolution, states: LayerStates
    ) -> Tensor:
        """Return mixed inputs, [N, num_inputs] float32, and store what later rows need.

        inputs: [T, num_inputs], of the tokens of the pass, or of what `replay` returns.
        The plan's `of_tokens` finds those of the tokens among the N that the recurrence runs.
        """
        ...

    def run_delta(self, mixed: Tensor, rule: DeltaRule, states: LayerStates) -> Tensor:
        """Run a rule, and commit its memories; return the outputs of the tokens of the pass.

        They are [T, heads, value_dim] float32. mixed: [N, num_inputs].
        """
        ...

    def run_scan(
        self,
        mixed: Tensor,
        steps: Tensor,
        keys: Tensor,
        queries: Tensor,
        rule: ScanRule,
        states: LayerStates,
    ) -> Tensor:
        """Run a selective scan, and commit its memories; return [T, channels] float32.

        mixed: [N, channels]. steps: [N, channels], before softplus. keys, queries: [N, state_dim].
        """
        ...

    def gate_heads(self, found: Tensor, gates: Tensor, norm: HeadNorm) -> Tensor:
        """Return outputs normalized by head, multiplied by their gates, in the type of these.

        found: [T, heads, value_dim] float32; gates: [T, heads * value_dim], as the result.
        """
        ...


def recurrence_kernels(backend: KernelBackend) -> RecurrenceKernels:
    """Return the kernels of a backend; the native kernels have their own in C++."""
    if backend.is_triton:
        from specdec.kernels.triton.recurrence import TritonRecurrence  # imports Triton

        return TritonRecurrence()
    return TorchRecurrence()
