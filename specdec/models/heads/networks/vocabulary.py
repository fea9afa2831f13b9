"""Embedding and output head of a draft head: in its files, or those of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.linear import VocabEmbedding, VocabHead
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.errors import UnsupportedModelError

_EMBEDDING = "embed_tokens.weight"


def read_embedding(
    reader: CheckpointReader, hidden_size: int, target: TargetRank, *, is_own: bool
) -> VocabEmbedding:
    """Read the embedding, unless it is the target's; an equal copy of that is not kept."""
    if not is_own:
        return target.embed_tokens
    shape = (target.config.vocab_size, hidden_size)
    table = reader.read(_EMBEDDING, shape, rows=target.vocab_slice)
    if hidden_size == target.config.hidden_size and _is_copy(table, target):
        return target.embed_tokens
    return VocabEmbedding(table.clone(), target.vocab_slice, target.group, reader.dtype)


def read_lm_head(
    reader: CheckpointReader, shape: tuple[int, int], target: TargetRank, *, is_own: bool
) -> VocabHead:
    """Read this rank's part of an output head of `shape`, unless it is the target's."""
    if not is_own:
        return target.lm_head
    return VocabHead(reader, "lm_head.weight", shape, target.group.share_of(shape[0]))


def read_target_ids(
    reader: CheckpointReader, vocab_size: int, *, is_reduced: bool
) -> Tensor | None:
    """Return the target's id of each draft token, [draft_vocab_size]; None if they are equal.

    Files store the difference of the two ids (`d2t`).
    """
    if not is_reduced:
        return None
    offsets = reader.tensors.slice("d2t").to(torch.int64)
    ids = torch.arange(len(offsets)) + offsets
    return checked_ids(ids, vocab_size).to(reader.device)


def own_target_tokens(target_ids: Tensor | None, own: range) -> Tensor:
    """Return the target's ids of a rank's draft tokens `own`, [len(own)] int32.

    target_ids: of all draft tokens; None if they are equal.
    """
    if target_ids is None:
        return torch.arange(own.start, own.stop, dtype=torch.int32)
    return target_ids[own.start : own.stop].to(torch.int32).contiguous()


def has_ascending_tokens(target_ids: Tensor | None) -> bool:
    """Return whether the target's ids of all draft tokens ascend, as the samples of kernels need.

    All tokens decide, not those of one rank: the ranks make the same calls.
    """
    return target_ids is None or bool((target_ids.diff() > 0).all())


def checked_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the target's ids of draft tokens as int64, [draft_vocab_size].

    Raises UnsupportedModelError for ids outside the target's vocabulary, and for duplicates.
    """
    ids = ids.to(torch.int64).cpu()
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UnsupportedModelError(
            f"the head maps a draft token to {outside[0].item()}; the target has {vocab_size} "
            "tokens"
        )
    if len(ids.unique()) != len(ids):
        raise UnsupportedModelError("the head maps two draft tokens to one token of the target")
    return ids


def _is_copy(table: Tensor, target: TargetRank) -> bool:
    """Return whether a table [V_local, hidden_size] has the rows of the target's embedding."""
    rows = torch.arange(len(table), device=target.device)
    return all(
        torch.equal(own, target.embed_tokens.rows(part))
        for own, part in zip(table.split(4096), rows.split(4096), strict=True)
    )
