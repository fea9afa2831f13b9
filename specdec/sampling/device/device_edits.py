"""Logits processors on the device: penalties, biases, bad words, min_tokens and token masks.

They are those of `logits_processors`, bit for bit: the same operations on the same float32 and
float64 values. The host sends what rules and grammars need; how often a token is in the output is
counted on the device, so that a step can begin before the host has the tokens of the one before.
NaN and +inf stay where a token is masked, so that a faulty row is found after the changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import PROMPT_TOKEN, Change, Entry, LogitEdits

EditRows = Callable[[Tensor, LogitEdits, Tensor, int], None]
"""Function of logits, edits, paths and the first token, as `apply_edits` takes them."""

_BITS_PER_WORD = 32
_SLAB_LOGITS = 2**22
"""Logits that the reference changes at once, which take about 60 bytes each."""


def apply_edits(
    logits: Tensor,  # [num_rows, num_tokens] float32
    edits: LogitEdits,
    paths: Tensor,  # [C, num_drafts] int64
    positions: Tensor,  # [num_rows] int64
    first_token: int,
    change_rows: EditRows,
) -> None:
    """Change logits in place, without a value that the host has to read.

    paths: the drafts before each of `edits.changes`, -1 for none. positions: index of the
    token that each row samples among the output tokens. first_token: of the columns. change_rows:
    applies penalties and masks, as `edit_rows`.
    """
    assert logits.dtype == torch.float32, "the sampler takes float32"
    if len(edits.biased):
        index = (edits.biased[:, Entry.ROW], edits.biased[:, Entry.COLUMN])
        biases = edits.biased.view(torch.float64)[:, Entry.VALUE].float()
        logits.index_put_(index, logits[index] + biases)
    if len(edits.changes):
        change_rows(logits, edits, paths, first_token)
    if len(edits.banned):
        index = (edits.banned[:, Entry.ROW], edits.banned[:, Entry.COLUMN])
        is_banned = positions[index[0]] < edits.banned[:, Entry.VALUE]
        own = logits[index]
        logits.index_put_(index, own.masked_fill(is_banned & (own < torch.inf), -torch.inf))


def chain_paths(rows: Tensor, drafts: Tensor) -> Tensor:
    """Return the drafts before rows of logits, [len(rows), num_drafts] int64; -1 for none.

    drafts: [num_sequences, num_drafts] int64, chains; a sequence has 1 + num_drafts rows of logits.
    """
    num_drafts = drafts.shape[1]
    places = torch.arange(num_drafts, device=drafts.device)
    is_after = places >= (rows % (1 + num_drafts))[:, None]
    return drafts[rows // (1 + num_drafts)].masked_fill(is_after, -1)


def edit_rows(logits: Tensor, edits: LogitEdits, paths: Tensor, first_token: int) -> None:
    """Apply the penalties and masks of `edits.changes`, which is not empty."""
    size = max(1, _SLAB_LOGITS // logits.shape[1])
    for start in range(0, len(edits.changes), size):
        changes, own_paths = edits.changes[start : start + size], paths[start : start + size]
        own = logits[changes[:, Change.ROW]]
        is_faulty = ~(own < torch.inf)
        if edits.seen is not None:
            own = _penalized(own, changes, own_paths - first_token, edits.seen)
        if len(edits.masks):
            is_allowed = _allowed(changes[:, Change.MASK], edits.masks, own.shape[1], first_token)
            own = own.masked_fill(~(is_allowed | is_faulty), -torch.inf)
        logits.index_copy_(0, changes[:, Change.ROW], own)


def _penalized(logits: Tensor, changes: Tensor, drafted: Tensor, seen: Tensor) -> Tensor:
    """Return logits [C, V] with penalties; drafted: [C, num_drafts], columns of drafts on paths."""
    places, penalties = changes[:, Change.PLACE], changes.view(torch.float64)
    counts = seen[places.clamp_min(0)]
    is_held = (drafted >= 0) & (drafted < logits.shape[1])
    drafted = drafted.clamp(0, logits.shape[1] - 1)
    counts.scatter_add_(1, drafted, is_held.int())
    num_output = (counts & (PROMPT_TOKEN - 1)).double()
    frequency, presence = (
        penalties[:, column, None] for column in (Change.FREQUENCY, Change.PRESENCE)
    )
    amounts = (frequency * num_output + presence * (num_output > 0)).float()
    factors = penalties[:, Change.REPETITION, None].float()
    changed = torch.where(logits > 0, logits / factors, logits * factors) - amounts
    return torch.where((counts > 0) & (places >= 0)[:, None], changed, logits)


def _allowed(mask_of: Tensor, masks: Tensor, num_tokens: int, first_token: int) -> Tensor:
    """Return the tokens that a row's mask allows, [C, num_tokens] bool; those beyond it are not."""
    tokens = first_token + torch.arange(num_tokens, device=masks.device)
    words, bits = tokens // _BITS_PER_WORD, tokens % _BITS_PER_WORD
    own = masks[mask_of.clamp_min(0)][:, words.clamp_max(masks.shape[1] - 1)]
    is_set = ((own >> bits) & 1).bool() & (words < masks.shape[1])
    return is_set | (mask_of < 0)[:, None]
