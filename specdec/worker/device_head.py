"""Drafts of a head on the device, behind the tokens that a step has verified there.

Tokens, positions and the number of tokens stay on the device: the next step takes them there, and
the host receives them with the result of this one. `device_pairs` has heads with KV, and
`device_state_head` those without. The drafts are those of `head_runner`, which serves all other
steps on the same features and KV.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.logit_edits import LogitEdits
from specdec.models.heads.base import DeviceHead, DeviceStateHead
from specdec.sampling.device_sampler import SamplingKind, VerifiedChains
from specdec.worker.device_rules import PARAM_WORDS, rules_of
from specdec.worker.device_state import DeviceState, DeviceStepLimits
from specdec.worker.head_sampler import HeadSampler, Shaping
from specdec.worker.step_graphs import StepShape


class PairParts(NamedTuple):
    """A rank's head with KV, and what it shares with the drafts that the host makes.

    features: [num_slots, feature_size] of the target's tokens in its pool; kv_cache: of the pairs.
    Both have a padding block behind the pool.
    """

    head: DeviceHead
    sampler: HeadSampler
    features: Tensor
    kv_cache: Tensor


class StateParts(NamedTuple):
    """A rank's head without KV."""

    head: DeviceStateHead
    sampler: HeadSampler


DrafterParts = PairParts | StateParts


class DraftRows(NamedTuple):
    """The rows behind which a head drafts, as the host has packed them.

    params: records of SAMPLE_PARAMS. num_prompt: tokens of the prompt. num_wanted: draft tokens.
    """

    params: Tensor  # [num_rows, PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next two
    num_prompt: Tensor
    num_wanted: Tensor


class HeadDrafts:
    """Static buffers of drafts, and the selection of their tokens."""

    def __init__(
        self,
        sampler: HeadSampler,
        state: DeviceState,
        limits: DeviceStepLimits,
        drafts: Tensor,
    ) -> None:
        """drafts: [max_num_seqs, 1 + max_draft_tokens] int64.

        A row of `drafts` receives the number of its draft tokens, then the tokens.
        """
        self._sampler, self._state, self._limits, self._drafts = sampler, state, limits, drafts
        num_rows = limits.max_num_seqs
        ids = partial(torch.zeros, dtype=torch.int64, device=drafts.device)
        self._rows = DraftRows(
            ids(num_rows, PARAM_WORDS),
            ids(num_rows) + state.padding_place,
            ids(num_rows),
            ids(num_rows),
        )
        self._ends = ids(num_rows) + 1  # lengths in front of the drafts
        self._tokens = ids(num_rows)  # drafted last
        self._index = ids(1)  # number of tokens that each row has, or had ended at
        self._offsets = torch.arange(1 + limits.max_query_len, device=drafts.device)

    def _start(self, rows: DraftRows, verified: VerifiedChains, shape: StepShape) -> Tensor:
        """Take the rows, with empty drafts; return those that want one, [num_rows] bool.

        The state has the lengths with the new tokens.
        """
        own = self._own_rows(shape.num_rows)
        ends = self._state.num_tokens[rows.places]
        most = self._limits.max_model_len - 1 - ends  # a token of the target fits behind
        wants = (rows.num_wanted > 0) & (verified.counts > 0)
        num_wanted = torch.minimum(rows.num_wanted, most).clamp_min(0) * wants
        for mine, given in zip(own, (*rows[:3], num_wanted), strict=True):
            mine.copy_(given)
        self._ends[: shape.num_rows] = ends
        self._drafts[: shape.num_rows, 0] = 0
        self._index.zero_()
        return wants

    def _select(
        self, logits: Tensor, kind: SamplingKind, num_rows: int, edits: LogitEdits | None
    ) -> None:
        """Select the next token of each row that goes on; the held drafts are those so far.

        A draft ends where the head's logits are not numbers. logits: [num_rows,
        len(vocab_slice)], of the head. edits: of the target's logits behind the draft, one row for
        each sequence.
        """
        rows, drafts = self._own_rows(num_rows), self._drafts[:num_rows]
        before = self._ends[:num_rows] + self._index - 1
        rules = None
        if kind is not SamplingKind.GREEDY:
            rules = rules_of(rows.params, before[:, None], rows.num_prompt)
        if edits is None:
            sample = self._sampler.select_on_device(logits, rules, kind)
        else:
            is_drafted = self._offsets[: drafts.shape[1] - 1] < self._index
            paths = drafts[:, 1:].masked_fill(~is_drafted, -1)[edits.rows]
            shaping = Shaping(edits, paths, before + 1 - rows.num_prompt)
            sample = self._sampler.select_shaped(logits, rules, kind, shaping)
        goes_on = self._goes_on(num_rows) & ~sample.is_invalid
        tokens = sample.token_ids.masked_fill(~goes_on, 0)
        column = (self._index + 1).clamp_max(drafts.shape[1] - 1)  # in a capture it may be behind
        drafts.index_copy_(1, column, tokens[:, None])
        drafts[:, 0] += goes_on
        self._state.held_drafts.index_copy_(0, rows.places, drafts)
        self._tokens[:num_rows] = tokens
        self._index += 1

    def _own_rows(self, num_rows: int) -> DraftRows:
        return DraftRows(*(each[:num_rows] for each in self._rows))

    def _goes_on(self, num_rows: int) -> Tensor:
        """Return the rows that have a token at each place so far, and want another."""
        num_drafts = self._drafts[:num_rows, 0]
        return (num_drafts == self._index) & (num_drafts < self._rows.num_wanted[:num_rows])
