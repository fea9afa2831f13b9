"""The parts of what drafts on a rank that the device shares with the host."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.kernels.reference.ngram import NgramLengths
from specdec.models.heads.networks.base import DeviceBlockHead, DeviceHead, DeviceStateHead
from specdec.types.messages import VerifiedRow
from specdec.worker.head.sampler import HeadSampler
from specdec.worker.head.texts import SequenceTexts

Verified = tuple[VerifiedRow, ...]


class PairParts(NamedTuple):
    """A rank's head that drafts token by token, and what it shares with the drafts of the host.

    features: [num_slots, feature_size] of the target's tokens in its pool; kv_cache: of the pairs.
    Both have a padding block after the pool.
    """

    head: DeviceHead
    sampler: HeadSampler
    features: Tensor
    kv_cache: Tensor


class BlockParts(NamedTuple):
    """A rank's head that drafts blocks; as in PairParts.

    kv_cache: with `num_scratch_blocks` after the padding block.
    """

    head: DeviceBlockHead
    sampler: HeadSampler
    features: Tensor
    kv_cache: Tensor


class StateParts(NamedTuple):
    """A rank's head without KV; has_tree_choices: whether the shape of its trees is given."""

    head: DeviceStateHead
    sampler: HeadSampler
    has_tree_choices: bool = False


class LookupParts(NamedTuple):
    """Prompt lookup; texts: those that the host knows."""

    ngrams: NgramLengths
    texts: SequenceTexts


KvParts = PairParts | BlockParts
HeadParts = KvParts | StateParts


class DrafterParts(NamedTuple):
    """A head, lookups, or both, of which the lookups come first."""

    head: HeadParts | None = None
    lookup: LookupParts | None = None
