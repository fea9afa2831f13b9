"""The gated delta rule (Yang et al. 2025, arXiv 2412.06464), by its recurrence and in chunks.

Without the delta it is the state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

The memory S of a head is [key_dim, value_dim]. A token decays it by a factor a, and replaces a
share b of what it has for the key k by the value v; then the query q reads it:

    S <- a S;  S <- S + k (b (v - k S));  o = q S

Without the delta the second step is S <- S + k v. In Kimi Delta Attention (arXiv 2510.26692) a is a
vector: each channel of the keys has a factor.

In chunks (section 3.3) this is a triangular system of each chunk, and products of matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.state_pool import StatePlan

_CHUNK_SIZE, _CHANNEL_CHUNK_SIZE = 64, 16
"""Tokens of a chunk; fewer where each channel decays, whose products are not those of matrices."""


class DeltaInputs(NamedTuple):
    """Inputs of the rule for N tokens, in float32; heads are those of values.

    decay: logarithm of a, of heads or of their channels. share: b; None without the delta.
    """

    query: Tensor  # [N, heads, key_dim], scaled
    key: Tensor  # [N, heads, key_dim], normalized
    value: Tensor  # [N, heads, value_dim]
    decay: Tensor  # [N, heads] or [N, heads, key_dim]
    share: Tensor | None = None  # [N, heads]

    def at(self, places: Tensor | slice) -> DeltaInputs:
        """Return those of some tokens."""
        query, key, value, decay, share = self
        return DeltaInputs(
            query[places],
            key[places],
            value[places],
            decay[places],
            None if share is None else share[places],
        )


def run_gated_delta(inputs: DeltaInputs, memory: Tensor, plan: StatePlan) -> Tensor:
    """Return the outputs of all extended inputs of a plan but the first `window`, and commit.

    The outputs are [N, heads, value_dim]; they are those of the recurrence for the tokens that rows
    run. A row has the same bits in any batch: its form depends on its own tokens alone, and the
    recurrence of several rows multiplies and adds by element.

    memory: [num_slots, heads, key_dim, value_dim], of which the plan's slots are changed.
    """
    outputs = inputs.value.new_zeros(inputs.value.shape)
    for span in plan.spans:
        if span.num_chunked:
            own = slice(span.first, span.first + span.num_chunked)
            outputs[own], memory[span.slot] = _run_chunks(inputs.at(own), memory[span.slot])
    states = memory[plan.levels.slots]
    for level in plan.levels.levels:
        first = slice(len(level.places))
        states = states[first if level.sources is None else level.sources]
        outputs[level.places] = _step(inputs.at(level.places), states)
        for state, slot in level.commits:
            memory[slot] = states[state]
    return outputs


def _step(token: DeltaInputs, states: Tensor) -> Tensor:
    """Run one token of each of B rows; states: [B, heads, key_dim, value_dim], changed in place."""
    decay = token.decay.exp()[..., None]
    states *= decay if token.decay.ndim == 3 else decay[..., None]
    key, new = token.key[..., None], token.value
    if token.share is not None:
        new = (new - (states * key).sum(-2)) * token.share[..., None]
    states += key * new[..., None, :]
    return (states * token.query[..., None]).sum(-2)


def _run_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of consecutive tokens of a row, and the state after them."""
    outputs, size = list[Tensor](), _CHUNK_SIZE if inputs.decay.ndim == 2 else _CHANNEL_CHUNK_SIZE
    for start in range(0, len(inputs.value), size):
        own = inputs.at(slice(start, start + size))
        found, state = _run_chunk(own, state)
        outputs.append(found)
    return torch.cat(outputs), state


def _run_chunk(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk of C tokens [C, heads, value_dim], and the state after it."""
    query, key, value = (each.transpose(0, 1) for each in inputs[:3])  # [heads, C, dim]
    total = inputs.decay.transpose(0, 1).cumsum(1)  # [heads, C], or [heads, C, key_dim]
    total = total if total.ndim == 3 else total[..., None]
    from_start, new = total.exp(), value
    if inputs.share is not None:
        # Less what the state and the tokens before it in the chunk have for the key of each token.
        share, keys = inputs.share.t()[..., None], _decayed_products(key, key, total)
        wanted = share * (value - (from_start * key) @ state)
        new = torch.linalg.solve_triangular(share * keys, wanted, upper=False, unitriangular=True)
    scores = _decayed_products(query, key, total)
    outputs = (from_start * query) @ state + scores @ new
    to_end = (total[:, -1:] - total).exp()
    state = total[:, -1, :, None].exp() * state + (key * to_end).transpose(1, 2) @ new
    return outputs.transpose(0, 1), state


def _decayed_products(queries: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    """Return products of queries with the keys up to their own tokens, decayed between both.

    Returns [heads, C, C]. queries, keys: [heads, C, key_dim]. total: the decay of the tokens of the
    chunk up to each, [heads, C, 1 or key_dim].
    """
    between = (total[:, :, None] - total[:, None]).movedim(-1, 1)
    between = between.tril().exp().tril().movedim(1, -1)  # [heads, C, C, 1 or key_dim]
    if between.shape[-1] == 1:
        return (queries @ keys.transpose(1, 2)) * between[..., 0]
    return (queries[:, :, None] * between * keys[:, None]).sum(-1)
