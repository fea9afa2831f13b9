"""Selection of a head's draft tokens, as the target will select its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.models.heads.networks.base import DraftHead
from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_growth import DepthChildren, GrownTrees
from specdec.sampling.device.device_sampler import DeviceRules, DeviceSample
from specdec.sampling.draft_temperature import draft_batch_of, draft_rules_of
from specdec.sampling.row_ops import CpuRowOps
from specdec.sampling.sampler import sample, sample_on_device
from specdec.sampling.sampling_batch import SamplingBatch, is_cut
from specdec.sampling.top_children import best_children_of, children_of_ranks
from specdec.sampling.vocab_shard import VocabShard, all_ranks_argmax
from specdec.text.vocab_map import VocabularyMap
from specdec.types.drafts.draft_tree import TokenTree, is_chain
from specdec.worker.batch.batch_state import BatchState, TokenSpan
from specdec.worker.batch.vocab_remap import VocabRemap


@dataclass
class PartialDraft:
    """The draft of one sequence so far, in the target's tokens.

    num_tokens: length of the sequence that it continues. num_wanted: draft tokens to make. depth:
    most of them that follow each other; fewer than num_wanted in a tree. parents: of the tokens of
    a tree; None for a chain.
    confidences: of its tokens, where they are noted, as in VerifiedRow.
    """

    seq_id: int
    num_tokens: int
    num_wanted: int
    depth: int
    token_ids: list[int] = field(default_factory=list)
    confidences: list[int] = field(default_factory=list)
    parents: tuple[int, ...] | None = None

    @property
    def is_tree(self) -> bool:
        """Return whether it may be a tree."""
        return self.num_wanted > self.depth > 0

    @property
    def is_complete(self) -> bool:
        """Return whether a chain has all its tokens."""
        return len(self.token_ids) >= self.num_wanted

    def set_tree(self, tree: TokenTree) -> None:
        """Set the nodes of a tree, which may be a chain."""
        self.token_ids = list(tree.token_ids)
        self.parents = None if is_chain(tree.parents) else tuple(tree.parents)

    def after(self, token_ids: Sequence[int]) -> DraftEnd:
        """Return the place after some draft tokens."""
        return DraftEnd(self.seq_id, self.num_tokens, token_ids)


class DraftEnd(NamedTuple):
    """The place of a draft token: after `num_tokens` tokens of a sequence and some drafts."""

    seq_id: int
    num_tokens: int
    token_ids: Sequence[int]


class Shaping(NamedTuple):
    """Changes of the target's logits after drafts on the device; arguments of `RowOps.edit`."""

    edits: LogitEdits
    paths: Tensor  # [C, num_drafts] int64
    positions: Tensor  # [num_rows] int64


class HeadSampler:
    """Selects draft tokens from a head's logits, equally on all ranks.

    A draft token is the argmax of the head's shaped logits, at the temperature of drafts
    (`specdec.sampling.draft_temperature`), and the noise that the target will use at its position,
    which is keyed by the target's token ids. Verifiers that need the distribution of the drafts get
    the argmax alone instead: without noise it is a function of the text, so it was the only
    possible draft.
    """

    def __init__(
        self,
        head: DraftHead,
        batch_state: BatchState,
        shard: VocabShard,
        *,
        has_confidences: bool = False,
    ) -> None:
        """shard: this rank's shard of the target's vocabulary.

        has_confidences: whether drafts are returned with confidences.
        """
        self.has_confidences = has_confidences
        self._batch_state = batch_state
        self._shard = shard
        first_token = head.vocab_slice.start
        self._head_shard = VocabShard(shard.group, first_token, head.vocab_size, shard.ops)
        self._target_ids = head.target_ids
        self._remap: VocabRemap | None = None
        if head.target_ids is not None:
            vocabulary = _vocabulary(head.target_ids, shard.vocab_size)
            self._remap = VocabRemap(vocabulary, shard.group, head.device, shard.ops)

    def select(self, logits: Tensor, drafts: Sequence[PartialDraft]) -> list[int | None]:
        """Return the next token of each draft; None where the logits have NaN or no finite value.

        logits: [len(drafts), len(vocab_slice)], of this rank. A collective call.
        """
        argmax = all_ranks_argmax(self._shard.ops.argmax(logits), self._head_shard)
        token_ids = argmax.token_ids
        if self._target_ids is not None:
            token_ids = self._target_ids[token_ids]
        selected: list[int | None] = token_ids.tolist()
        states = [self._batch_state.is_drafted_greedily(each.seq_id) for each in drafts]
        if members := [index for index, is_greedy in enumerate(states) if not is_greedy]:
            own = logits if len(members) == len(drafts) else logits[members]
            sampled = self._sample(own, [drafts[member] for member in members])
            for member, token_id in zip(members, sampled, strict=True):
                selected[member] = token_id
        rows = zip(selected, argmax.invalid_rows, strict=True)
        return [None if is_invalid else token_id for token_id, is_invalid in rows]

    def select_on_device(
        self, logits: Tensor, rules: DeviceRules | None, shaping: Shaping | None = None
    ) -> DeviceSample:
        """Return the next token of each row, without a value that the host has to read.

        logits, rules: as in `sample_on_device`, with the temperatures of the requests.
        shaping: changes of the logits, with which also a greedy row is selected among the target's
        tokens; None for no changes. A collective call.
        """
        if rules is None and shaping is None:
            sample = sample_on_device(logits, None, self._head_shard)
            return replace(sample, token_ids=self._of_target(sample.token_ids))
        logits, shard = self._logits_of_target(logits, shaping)
        return sample_on_device(logits, _draft_rules(rules), shard)

    def children_on_device(
        self,
        logits: Tensor,
        rules: DeviceRules | None,
        count: int,
        shaping: Shaping | None = None,
    ) -> DeviceChildren:
        """Return what `children` does, without a value that the host has to read.

        Arguments as in `select_on_device`. A collective call.
        """
        if rules is None and shaping is None:
            found = best_children_of(logits, None, count, self._head_shard)
            return found._replace(token_ids=self._of_target(found.token_ids))
        logits, shard = self._logits_of_target(logits, shaping)
        return best_children_of(logits, _draft_rules(rules), count, shard)

    def _of_target(self, token_ids: Tensor) -> Tensor:
        """Return the target's ids of the head's tokens; of an invalid row any."""
        if self._target_ids is None:
            return token_ids
        return self._target_ids[token_ids.clamp(0, len(self._target_ids) - 1)]

    def _logits_of_target(
        self, logits: Tensor, shaping: Shaping | None
    ) -> tuple[Tensor, VocabShard]:
        """Return the logits of the target's tokens, with their changes."""
        shard = self._shard
        if self._remap is not None:
            logits, shard = self._remap.apply(logits), self._remap.shard
        if shaping is not None:
            logits = logits.float()
            shard.ops.edit(logits, *shaping, shard.first_token)
        return logits, shard

    def note_confidences(
        self, logits: Tensor, drafts: Sequence[PartialDraft], selected: Sequence[int | None]
    ) -> None:
        """Add the head's confidences to drafts that go on with a selected token.

        logits: as in `select`. A collective call.
        """
        found = self.confidences(logits).tolist()
        for draft, token_id, confidence in zip(drafts, selected, found, strict=True):
            if token_id is not None:
                draft.confidences.append(confidence)

    def confidences(self, logits: Tensor) -> Tensor:
        """Return the head's confidence in each row, in thousandths, [len(logits)] int64.

        It is the largest probability by the raw logits, which depend on the text before the token
        and not on the token; of logits that are not numbers it is any. logits: as in `select`. A
        collective call.
        """
        total, best = logits.float().logsumexp(1), logits.float().amax(1)
        of_ranks = self._shard.group.all_gather(torch.stack([total, best]))
        probability = (of_ranks[:, 1].amax(0) - of_ranks[:, 0].logsumexp(0)).exp()
        return (1000 * probability).round().to(torch.int64)

    def whole_draft_params(self, drafts: Sequence[PartialDraft]) -> SampleParams | None:
        """Return the parameters of the first tokens for `WholeDraftHead.draft`, [len(drafts)].

        None where some draft needs its logits here: for penalties, a bias or a mask, or for a cut
        by top_k, top_p or min_p with several ranks.
        """
        params = self._sampling_batch([each.after(()) for each in drafts]).params
        greedy = [self._batch_state.is_drafted_greedily(each.seq_id) for each in drafts]
        params["temperature"][greedy] = 0.0
        is_plain = all(
            is_greedy or self._batch_state.has_plain_logits(each.seq_id)
            for each, is_greedy in zip(drafts, greedy, strict=True)
        )
        is_whole = self._shard.group.size == 1 or not is_cut(params).any()
        return params if is_plain and is_whole else None

    def children(self, logits: Tensor, ends: Sequence[DraftEnd], count: int) -> DeviceChildren:
        """Return the `count` best draft tokens at each place, the one that `select` returns first.

        Where the logits have NaN or no finite value there are none. logits: as in `select`. A
        collective call; the children are on the host.
        """
        best = all_ranks_argmax(self._shard.ops.argmax(logits), self._head_shard)
        rows_of: dict[bool, list[int]] = {True: [], False: []}
        for row, (end, is_invalid) in enumerate(zip(ends, best.invalid_rows, strict=True)):
            if not is_invalid:
                rows_of[self._batch_state.is_drafted_greedily(end.seq_id)].append(row)
        token_ids = torch.zeros(len(ends), count, dtype=torch.int64)
        children = DeviceChildren(token_ids, torch.zeros_like(token_ids, dtype=torch.float64))
        for is_greedy, rows in rows_of.items():
            if rows:
                find = self._greedy_children if is_greedy else self._sampled_children
                own = logits if len(rows) == len(ends) else logits[rows]
                found = find(own, [ends[row] for row in rows], count)
                children.token_ids[rows] = found.token_ids.cpu()
                children.confidences[rows] = found.confidences.cpu()
        return children

    def best_first(self, children: DepthChildren, num_nodes: Tensor, max_nodes: int) -> GrownTrees:
        """Return trees of up to `num_nodes` children each, [B] int64; see `BestFirstTrees`.

        max_nodes: at least these. Reads no value of a device.
        """
        device = num_nodes.device
        log_survival = children.confidences.to(device).log()
        trees = self._shard.ops.best_first(log_survival, num_nodes, max_nodes)
        token_ids = children.token_ids.to(device)
        index = (trees.depths - 1).clamp_min(0) * token_ids.shape[2] + trees.ranks
        found = token_ids.flatten(1).gather(1, index).masked_fill(trees.depths == 0, 0)
        return GrownTrees(trees.counts, found, trees.parents)

    def _greedy_children(
        self, logits: Tensor, ends: Sequence[DraftEnd], count: int
    ) -> DeviceChildren:
        """Return the head's own best tokens."""
        del ends
        found = best_children_of(logits, None, count, self._head_shard, on_host=True)
        return found._replace(token_ids=self._of_target(found.token_ids))

    def _sampled_children(
        self, logits: Tensor, ends: Sequence[DraftEnd], count: int
    ) -> DeviceChildren:
        """Return the best tokens by the logits and the noise that the target will sample from."""
        ops = self._shard.ops
        if self._remap is None or not isinstance(ops, CpuRowOps) or not self._are_plain(ends):
            logits, batch, shard = self._shaped(logits, ends)
            return best_children_of(logits, batch, count, shard, on_host=True)
        assert self._target_ids is not None
        batch, target_ids = self._sampling_batch(ends), self._target_ids.to(torch.int32)

        def children(whole: Tensor, own: slice) -> DeviceChildren:
            return ops.draft_children(whole, target_ids, batch[own], count)

        return children_of_ranks(logits, count, self._head_shard, children)

    def _are_plain(self, ends: Sequence[DraftEnd]) -> bool:
        """Return whether no draft token at these places needs a logit of another token."""
        return all(self._batch_state.has_plain_logits(end.seq_id) for end in ends)

    def _sample(self, logits: Tensor, drafts: Sequence[PartialDraft]) -> list[int]:
        """Return the tokens that the target would sample from these logits."""
        ends = [each.after(each.token_ids) for each in drafts]
        token_ids: list[int] = sample(*self._shaped(logits, ends)).tolist()
        return token_ids

    def _shaped(
        self, logits: Tensor, ends: Sequence[DraftEnd]
    ) -> tuple[Tensor, SamplingBatch, VocabShard]:
        """Return logits of the target's tokens, shaped as the target's own, and their sampling."""
        shard = self._shard
        if self._remap is not None:
            logits, shard = self._remap.apply(logits), self._remap.shard
        processor = self._batch_state.draft_logits_processor(ends)
        return processor.apply(logits), self._sampling_batch(ends), shard

    def _sampling_batch(self, ends: Sequence[DraftEnd]) -> SamplingBatch:
        """Return how to sample draft tokens at these places, with the noise of the target."""
        spans = [TokenSpan(each.seq_id, each.num_tokens + len(each.token_ids)) for each in ends]
        return draft_batch_of(self._batch_state.sampling_batch(spans))


def _draft_rules(rules: DeviceRules | None) -> DeviceRules | None:
    return None if rules is None else draft_rules_of(rules)


def _vocabulary(target_ids: Tensor, target_size: int) -> VocabularyMap:
    """Return the map of a head's draft tokens, all of which the target has."""
    to_target = target_ids.cpu().numpy().astype(np.int32)
    to_draft = np.full(target_size, -1, dtype=np.int32)
    to_draft[to_target] = np.arange(len(to_target), dtype=np.int32)
    return VocabularyMap(to_target, to_draft, has_equal_ids=False)
