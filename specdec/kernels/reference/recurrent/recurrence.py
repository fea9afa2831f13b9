"""Recurrent layers between their projections, in torch: the reference of Triton's kernels.

The inputs of the tokens that rows run are first *mixed*: the columns that a causal convolution
reads are replaced by its outputs, in float32. `DeltaRule` names the columns of mixed inputs that
are queries, keys, values, decays and shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.reference.device_states import RowPlan
from specdec.kernels.reference.recurrent.convolution import causal_convolution
from specdec.kernels.reference.recurrent.gated_delta import DeltaInputs, run_gated_delta
from specdec.kernels.reference.state_pool import StatePlan, StatePool

NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys, which have no weights."""

AnyStatePlan = StatePlan | RowPlan


class LayerStates(NamedTuple):
    """The states of a recurrent layer in a pass, which the pool has planned.

    layer: its index in the pool.
    """

    pool: StatePool
    layer: int
    plan: AnyStatePlan

    @property
    def inputs(self) -> Tensor:
        """Inputs of the layer in the pool, [num_slots, ...]."""
        return self.pool.inputs[self.layer]

    @property
    def memory(self) -> Tensor:
        """Memories of the layer in the pool, [num_slots, ...] float32."""
        return self.pool.memory[self.layer]


@dataclass(frozen=True)
class InputConvolution:
    """Convolution of some columns of the inputs; the others stay as they are.

    first: column of the first channel. activates: whether SiLU follows.
    """

    weight: Tensor  # [channels, kernel_size]
    bias: Tensor | None  # [channels]
    first: int = 0
    activates: bool = True

    @property
    def columns(self) -> slice:
        """The columns that are channels."""
        return slice(self.first, self.first + len(self.weight))


@dataclass(frozen=True)
class DeltaRule:
    """Parameters of a rule of `gated_delta` for a rank's heads of values.

    query, key, value, decay, share: first columns of mixed inputs; a share of None is a rule
    without the delta, whose values are multiplied by the step instead. A step is softplus(decay +
    bias), and the logarithm of the decay -rate * step. num_keys: heads of queries and keys, of
    which value head h reads the one at (h + first_head) // heads_per_key. normalizes: whether
    queries and keys are normalized. skip: factors of values that are added to the outputs.
    """

    num_keys: int
    heads_per_key: int
    key_dim: int
    value_dim: int
    query: int
    key: int
    value: int
    decay: int
    share: int | None
    rate: Tensor  # [heads] float32
    bias: Tensor  # [heads], or [heads, key_dim] where each channel decays; float32
    skip: Tensor | None = None  # [heads] float32
    first_head: int = 0
    normalizes: bool = True
    query_scale: float = 1.0
    share_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        return len(self.rate)

    @property
    def decays_channels(self) -> bool:
        """Return whether each channel of a key has a separate decay."""
        return self.bias.ndim == 2


@dataclass(frozen=True)
class ScanRule:
    """Parameters of the selective scan of a rank's channels (Mamba)."""

    rate: Tensor  # [channels, state_dim] float32
    skip: Tensor  # [channels] float32


@dataclass(frozen=True)
class HeadNorm:
    """Norm of each head's outputs, multiplied by an activated gate.

    rounds: whether outputs are rounded to the type of the gates before and after the norm.
    is_silu: whether the activation is SiLU; else it is a sigmoid.
    """

    weight: Tensor  # [value_dim]
    eps: float
    rounds: bool
    is_silu: bool


class RecurrenceKernels:
    """Kernels of rows of tokens, each with a state; a row's bits do not depend on others.

    These run on torch's operators, for the ragged batches that the host plans.
    """

    def replay(self, x: Tensor, states: LayerStates) -> Tensor:
        """Return the hidden states that a layer projects to inputs, and store those of guesses.

        x: [T, num_hidden], of the tokens of the pass; the result is x where tails are inputs.
        The plan's `of_hidden` finds those of the tokens.
        """
        plan = _of_host(states)
        return states.pool.replay(states.layer, x, plan)

    def convolve(
        self, inputs: Tensor, convolution: InputConvolution, states: LayerStates
    ) -> Tensor:
        """Return mixed inputs, [N, num_inputs] float32, and store what later rows need.

        inputs: [T, num_inputs], of the tokens of the pass, or of what `replay` returns.
        The plan's `of_tokens` finds those of the tokens among the N that the recurrence runs.
        """
        plan = _of_host(states)
        extended = states.pool.extend(states.layer, inputs, plan)
        weight, bias = convolution.weight, convolution.bias
        mixed = causal_convolution(extended[:, convolution.columns], weight, bias, plan.taps)
        mixed = F.silu(mixed) if convolution.activates else mixed
        if len(weight) == inputs.shape[1]:
            return mixed
        found = extended[plan.window :].float()
        found[:, convolution.columns] = mixed
        return found

    def run_delta(self, mixed: Tensor, rule: DeltaRule, states: LayerStates) -> Tensor:
        """Run a rule, and commit its memories; return the outputs of the tokens of the pass.

        They are [T, heads, value_dim] float32. mixed: [N, num_inputs].
        """
        plan = _of_host(states)
        inputs, values = _delta_inputs(mixed, rule)
        found = run_gated_delta(inputs, states.memory, plan)
        if rule.skip is not None:
            found += rule.skip[:, None] * values
        return plan.of_tokens(found)

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
        plan = _of_host(states)
        sizes, shape = F.softplus(steps.float()), (-1, mixed.shape[1], -1)
        inputs = DeltaInputs(
            queries.float()[:, None].expand(shape),
            keys.float()[:, None].expand(shape),
            (mixed * sizes)[..., None],
            -rule.rate * sizes[..., None],
        )
        found = run_gated_delta(inputs, states.memory, plan).squeeze(2)
        return plan.of_tokens(found + rule.skip * mixed)

    def gate_heads(self, found: Tensor, gates: Tensor, norm: HeadNorm) -> Tensor:
        """Return outputs normalized by head, multiplied by their gates, in the type of these.

        found: [T, heads, value_dim] float32; gates: [T, heads * value_dim], as the result.
        """
        dtype = gates.dtype
        values = found.to(dtype).float() if norm.rounds else found
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
        scaled = values * scale
        normed = scaled.to(dtype) * norm.weight if norm.rounds else scaled * norm.weight.float()
        activated = F.silu(gates.float()) if norm.is_silu else gates.float().sigmoid()
        return (normed.flatten(1) * activated).to(dtype)


def _of_host(states: LayerStates) -> StatePlan:
    assert isinstance(states.plan, StatePlan), "a plan of the device"
    return states.plan


def _delta_inputs(mixed: Tensor, rule: DeltaRule) -> tuple[DeltaInputs, Tensor]:
    """Return what the recurrence needs of mixed inputs, and their values [N, heads, value_dim]."""
    num_heads = rule.num_heads
    heads = torch.arange(num_heads, device=mixed.device) + rule.first_head
    query, key = (
        _heads(mixed, first, rule.num_keys, rule.key_dim) for first in (rule.query, rule.key)
    )
    if rule.normalizes:
        query, key = _normalized(query), _normalized(key)
    of_heads = heads.div(rule.heads_per_key, rounding_mode="floor")
    values = _heads(mixed, rule.value, num_heads, rule.value_dim)
    steps = F.softplus(_heads(mixed, rule.decay, *_bias_shape(rule)) + rule.bias)
    rate = rule.rate[:, None] if rule.decays_channels else rule.rate
    share, new = None, values
    if rule.share is None:
        new = values * steps[..., None]
    else:
        share = mixed[:, rule.share : rule.share + num_heads].sigmoid() * rule.share_scale
    scaled = query[:, of_heads] * rule.query_scale
    return DeltaInputs(scaled, key[:, of_heads], new, -rate * steps, share), values


def _bias_shape(rule: DeltaRule) -> tuple[int, int | None]:
    return rule.num_heads, rule.key_dim if rule.decays_channels else None


def _heads(mixed: Tensor, first: int, num_heads: int, dim: int | None) -> Tensor:
    """Return columns by head, [N, num_heads, dim]; [N, num_heads] without a dimension."""
    if dim is None:
        return mixed[:, first : first + num_heads]
    heads: Tensor = mixed[:, first : first + num_heads * dim].unflatten(1, (num_heads, dim))
    return heads


def _normalized(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
