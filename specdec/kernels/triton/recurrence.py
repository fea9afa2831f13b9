"""Recurrent layers on a GPU; `specdec.kernels.reference.recurrent.recurrence` is the reference."""

from __future__ import annotations

import triton
from torch import Tensor

from specdec.kernels.reference.device_states import RowPlan
from specdec.kernels.reference.recurrent.recurrence import (
    DeltaRule,
    HeadNorm,
    InputConvolution,
    LayerStates,
    RecurrenceKernels,
    ScanRule,
)
from specdec.kernels.triton.device import recurrence as kernels

BLOCK_TOKENS, BLOCK_COLUMNS, MOST_KEPT = 16, 128, 2048
"""Tile of a convolution; most values of a tile of kept inputs."""

MEMORY_TILE, SCAN_CHANNELS = 4096, 64
"""Values of a head's memory that a program has in registers; channels of a scan."""


class TritonRecurrence(RecurrenceKernels):
    """Kernels in Triton, for plans of rows; its launches follow from shapes alone."""

    def replay(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrenceKernels; the tails of a DeviceStatePool are inputs."""
        return x

    def convolve(
        self, inputs: Tensor, convolution: InputConvolution, states: LayerStates
    ) -> Tensor:
        """See RecurrenceKernels. Mixed inputs that no row runs are 0."""
        plan, window = _of_device(states), states.pool.window
        assert inputs.stride(1) == 1
        weight, bias, num_inputs = convolution.weight, convolution.bias, inputs.shape[1]
        mixed = inputs.new_zeros(plan.num_mixed, num_inputs, dtype=states.memory.dtype)
        block_s = triton.next_power_of_2(window + plan.max_guesses)
        block = columns_of(block_s)
        kernels.convolve[(plan.num_rows, triton.cdiv(num_inputs, block))](
            inputs,
            states.inputs,
            plan.spans,
            weight,
            weight if bias is None else bias,
            mixed,
            inputs.stride(0),
            num_inputs,
            convolution.first,
            len(weight),
            WINDOW=window,
            MAX_GUESSES=plan.max_guesses,
            HAS_BIAS=bias is not None,
            ACTIVATES=convolution.activates,
            BLOCK_T=BLOCK_TOKENS,
            BLOCK_S=block_s,
            BLOCK=block,
            num_warps=4,
        )
        return mixed

    def run_delta(self, mixed: Tensor, rule: DeltaRule, states: LayerStates) -> Tensor:
        """See RecurrenceKernels. Outputs of padding are 0."""
        plan = _of_device(states)
        output = mixed.new_zeros(plan.num_tokens, rule.num_heads, rule.value_dim)
        block_k, block_v = memory_tile(rule.key_dim, rule.value_dim)
        tiles = triton.cdiv(rule.value_dim, block_v)
        kernels.run_delta[(plan.num_rows, rule.num_heads, tiles)](
            mixed,
            plan.spans,
            states.memory,
            output,
            *_arguments(rule, mixed.shape[1]),
            KEY_DIM=rule.key_dim,
            VALUE_DIM=rule.value_dim,
            MAX_GUESSES=plan.max_guesses,
            NORMALIZES=rule.normalizes,
            HAS_SHARE=rule.share is not None,
            HAS_SKIP=rule.skip is not None,
            BY_CHANNEL=rule.decays_channels,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
        )
        return output

    def run_scan(
        self,
        mixed: Tensor,
        steps: Tensor,
        keys: Tensor,
        queries: Tensor,
        rule: ScanRule,
        states: LayerStates,
    ) -> Tensor:
        """See RecurrenceKernels. Outputs of padding are 0."""
        plan = _of_device(states)
        num_channels, state_dim = rule.rate.shape
        output = mixed.new_zeros(plan.num_tokens, num_channels)
        kernels.run_scan[(plan.num_rows, triton.cdiv(num_channels, SCAN_CHANNELS))](
            mixed,
            steps.contiguous(),
            keys.contiguous(),
            queries.contiguous(),
            plan.spans,
            states.memory,
            output,
            rule.rate,
            rule.skip,
            num_channels,
            STATE_DIM=state_dim,
            MAX_GUESSES=plan.max_guesses,
            BLOCK_S=triton.next_power_of_2(state_dim),
            BLOCK=SCAN_CHANNELS,
            num_warps=4,
        )
        return output

    def gate_heads(self, found: Tensor, gates: Tensor, norm: HeadNorm) -> Tensor:
        """See RecurrenceKernels."""
        num_tokens, num_heads, size = found.shape
        assert gates.stride(1) == 1
        output = gates.new_empty(num_tokens, num_heads * size)
        kernels.gate_heads[(num_tokens, num_heads)](
            found,
            gates,
            norm.weight,
            output,
            gates.stride(0),
            norm.eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            ROUNDS=norm.rounds,
            IS_SILU=norm.is_silu,
            num_warps=1,
        )
        return output


def _of_device(states: LayerStates) -> RowPlan:
    assert isinstance(states.plan, RowPlan), "a plan of the host"
    return states.plan


def _arguments(rule: DeltaRule, num_inputs: int) -> tuple[Tensor | int | float, ...]:
    """Return the arguments of a rule that are no constants, in order."""
    return (
        rule.rate,
        rule.bias,
        rule.rate if rule.skip is None else rule.skip,
        num_inputs,
        rule.query,
        rule.key,
        rule.value,
        rule.decay,
        0 if rule.share is None else rule.share,
        rule.first_head,
        rule.heads_per_key,
        rule.query_scale,
        rule.share_scale,
    )


def columns_of(block_s: int) -> int:
    """Return the columns of a tile of inputs. block_s: rows of a tile of kept ones."""
    return max(1, min(BLOCK_COLUMNS, MOST_KEPT // block_s))


def memory_tile(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the keys and the values of a part of a memory that a program runs."""
    block_k = triton.next_power_of_2(key_dim)
    return block_k, max(1, min(triton.next_power_of_2(value_dim), MEMORY_TILE // block_k))
