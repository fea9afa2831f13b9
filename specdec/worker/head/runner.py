"""Drafting with a head on a rank of the target, at the end of each step.

The head sees the target's hidden states, which never leave the rank. It drafts after the tokens
that the step has verified; drafts and tokens are returned together, and the engine sends the drafts
back with the next step, or has it take them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, PairInputs, SlotMove
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS
from specdec.models.heads.config import stores_features
from specdec.models.heads.networks.base import (
    DeviceBlockHead,
    DeviceDrafts,
    DeviceHead,
    DeviceStateHead,
    DraftHead,
    HeadState,
    WholeDraftHead,
    WholeTreeHead,
    first_slot,
)
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.drafts.draft_tree import TreeSize, num_growth_slots
from specdec.types.messages import StepInput, StepRow, VerifiedRow
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.head.features import HeadFeatures
from specdec.worker.head.kv import HeadKv
from specdec.worker.head.parts import BlockParts, HeadParts, PairParts, StateParts, Verified
from specdec.worker.head.sampler import HeadSampler, PartialDraft
from specdec.worker.head.trees import HeadTrees


class HeadRunner:
    """One rank's draft head, which drafts for the rows whose `drafting.num_next` is above 0.

    A head without KV continues each row from the hidden state of its last verified token. A head
    with KV first computes the pairs that its KV lacks. If they are more than `max_pairs` over all
    rows, as after speculation was off for long, the rest is computed in the next steps, and a
    sequence that lags has no draft meanwhile.
    """

    def __init__(
        self,
        head: DraftHead,
        batch_state: BatchState,
        shard: VocabShard,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_pairs: int,
        feature_dtype: torch.dtype,
        tree_choices: Sequence[Sequence[int]] = (),
        has_confidences: bool = False,
        has_padding_block: bool = False,
        num_scratch_blocks: int = 0,
        on_replace: Callable[[], None] | None = None,
    ) -> None:
        """Allocate the head's KV and features for a pool of `num_blocks`, if it has attention.

        batch_state, shard: of the target's rank. has_padding_block: as in ModelRunner.
        num_scratch_blocks: after it, for `BlockDrafts`. tree_choices: as in HeadTrees.
        has_confidences: whether chains are returned with confidences, which a call for a whole
        draft does not give. on_replace: is called after each `replace_head`.
        """
        self._batch_state, self._shard = batch_state, shard
        self._block_size, self._max_model_len = block_size, max_model_len
        self._max_pairs, self._tree_choices = max_pairs, tree_choices
        self._has_confidences, self._on_replace = has_confidences, on_replace
        self._kv: HeadKv | None = None
        self._kv_cache: Tensor | None = None
        if head.num_kv_layers:
            num_slots = (num_blocks + has_padding_block) * block_size
            features = HeadFeatures(
                head,
                num_slots,
                feature_dtype,
                stores_features=has_padding_block or stores_features(head.device.type),
            )
            self._kv = HeadKv(batch_state, num_blocks, block_size, features, first_slot(head))
            self._kv_cache = head.new_kv_cache(num_slots + num_scratch_blocks * block_size)
        self._use(head)

    def replace_head(self, head: DraftHead) -> None:
        """Draft with `head` from the next draft on; it has the sizes of the one before.

        Features and KV of the sequences stay. KV that another head has computed is an approximation
        of that of this one: it can cost acceptance, and changes no verified token.
        """
        self._use(head)
        if self._on_replace is not None:
            self._on_replace()

    def _use(self, head: DraftHead) -> None:
        self.head = head
        if self._kv is not None:
            self._kv.features.use(head)
        self._sampler = HeadSampler(
            head, self._batch_state, self._shard, has_confidences=self._has_confidences
        )
        self._trees = HeadTrees(head, self._sampler, self._tree_choices)
        self._runs_nodes = head.reads_drafts and head.capabilities.runs_nodes
        is_whole = head.capabilities.drafts_whole and not self._has_confidences
        self._whole_head = cast(WholeDraftHead, head) if is_whole else None

    @property
    def parts(self) -> HeadParts:
        """Return what steps on the device draft with."""
        head, sampler, kind = self.head, self._sampler, self.head.capabilities.on_device
        assert kind is not None, "a head of native kernels"
        if kind is DeviceDrafts.STATES:
            return StateParts(cast(DeviceStateHead, head), sampler, bool(self._tree_choices))
        assert self._kv is not None
        assert self._kv_cache is not None
        stored = (sampler, self._kv.features.page, self._kv_cache)
        if kind is DeviceDrafts.BLOCKS:
            return BlockParts(cast(DeviceBlockHead, head), *stored)
        return PairParts(cast(DeviceHead, head), *stored)

    @property
    def follows_steps(self) -> bool:
        """Return whether the head has KV, of a pair for each token."""
        return self._kv is not None

    def has_pairs_before(self, row: StepRow) -> bool:
        """See HeadKv; a head without KV has no pairs."""
        return self._kv is None or self._kv.has_pairs_before(row)

    def prepare_device_step(self) -> None:
        """Store what a step on the device reads; a collective call."""
        if self._kv is not None:
            self._kv.features.write()

    def note_device_step(self, rows: Sequence[StepRow], verified: Verified) -> None:
        """Record a step that ran on the device, with drafts after the rows that want some."""
        if self._kv is None:
            return
        tokens = {row.seq_id: row.token_ids for row in verified}
        for row in rows:
            self._kv.note_step(row, tokens.get(row.seq_id, ()))

    def note_output(self, verified: Sequence[VerifiedRow]) -> None:
        """Record the new tokens of rows that the host has verified, of a step on the device."""
        if self._kv is not None:
            for row in verified:
                self._kv.append_output(row.seq_id, row.token_ids)

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self.head.taps

    def update(self, step: StepInput) -> None:
        """Apply the sequences' changes of a step."""
        if self._kv is not None:
            self._kv.update(step)

    def draft(
        self,
        rows: Sequence[StepRow],
        batch: ForwardBatch,
        states: Tensor,
        verified: Verified,
        moves: Sequence[SlotMove],
    ) -> Verified:
        """See RankDrafter."""
        if self._kv is not None:
            self._kv.store(rows, batch, states)
            if moves:
                self._kv.features.move(moves)
            for row in verified:
                self._kv.append_output(row.seq_id, row.token_ids)
        return self.draft_next(rows, states, verified)

    @torch.inference_mode()
    def draft_next(self, rows: Sequence[StepRow], states: Tensor, verified: Verified) -> Verified:
        """See RankDrafter; a head with KV reads the stored features of the step, and no states."""
        tokens = {row.seq_id: row.token_ids for row in verified}
        active = [row for row in rows if row.drafting.num_next and tokens.get(row.seq_id, (0,))]
        if not active:
            return verified
        if self._kv is not None:
            drafts = self._draft_with_kv(self._kv, active)
        else:
            drafts = self._draft_without_kv(rows, active, tokens, states)
        drafted = {each.seq_id: each for each in drafts}
        return tuple(_with_draft(row, drafted.get(row.seq_id)) for row in verified)

    def _draft_without_kv(
        self,
        rows: Sequence[StepRow],
        active: Sequence[StepRow],
        tokens: dict[int, tuple[int, ...]],
        states: Tensor,
    ) -> Sequence[PartialDraft]:
        """Draft from the hidden state of each active row's last verified token."""
        ends = accumulate(len(row.token_ids) for row in rows)
        starts = {row.seq_id: end - len(row.token_ids) for row, end in zip(rows, ends, strict=True)}
        drafts, chunks, last = [], [], []
        for row in (each for each in active if each.samples):
            own, table = tokens[row.seq_id], self._batch_state.block_table(row.seq_id)
            draft = self._new_draft(row, row.known_end + len(own))
            if draft.is_complete:
                continue
            drafts.append(draft)
            slot, adapter_id = draft.num_tokens - 1, row.adapter_id
            chunks.append(Chunk(own[-1:], slot, table, adapter_id=adapter_id))
            path = row.accepted_drafts(own[:-1])
            offset = path[-1] + 1 if path else 0  # of the last accepted draft after the base
            last.append(starts[row.seq_id] + row.num_known_tokens - 1 + offset)
        if drafts:
            index = torch.tensor(last, device=states.device)
            features = self.head.features(states[index])
            state = self._begin(chunks, features, drafts)
            self._continue(state, len(chunks), range(len(chunks)), drafts)
        return drafts

    def _draft_with_kv(self, kv: HeadKv, active: Sequence[StepRow]) -> Sequence[PartialDraft]:
        """Compute missing pairs, and draft for the rows that then have all of theirs."""
        num_left = self._max_pairs
        chunks, drafts, members = list[Chunk](), list[PartialDraft](), list[int]()
        for row in active:
            end = kv.pairs_end(row)
            num_missing = kv.num_missing(row.seq_id, end)
            if not (count := min(num_missing, num_left)):
                continue
            num_left -= count
            draft = self._new_draft(row, end)
            if row.samples and count == num_missing and not draft.is_complete:
                members.append(len(chunks))
                drafts.append(draft)
            chunks.append(kv.pairs(row.seq_id, count))
            kv.note_computed(row.seq_id, chunks[-1])
        if not chunks:
            return ()
        features = kv.features_of(chunks)
        if self._draft_whole(chunks, features, drafts, members):
            return drafts
        state = self._begin(chunks, features, drafts)
        if drafts:
            self._continue(state, len(chunks), members, drafts)
        return drafts

    def _draft_whole(
        self,
        chunks: Sequence[Chunk],
        features: Tensor,
        drafts: Sequence[PartialDraft],
        members: Sequence[int],
    ) -> bool:
        """Draft in one call of the head, where it and all drafts allow that; return whether.

        members: the chunks after which `drafts` follow.
        """
        if self._whole_head is None or self._kv_cache is None or not drafts:
            return False
        is_tree = any(draft.is_tree for draft in drafts)
        can_draft = not is_tree or self.head.capabilities.drafts_whole_trees
        params = self._sampler.whole_draft_params(drafts) if can_draft else None
        if params is None:
            return False
        sizes, of_chunks = [TreeSize(0, 0)] * len(chunks), np.zeros(len(chunks), SAMPLE_PARAMS)
        of_chunks[list(members)] = params
        for member, draft in zip(members, drafts, strict=True):
            sizes[member] = TreeSize(draft.num_wanted, draft.depth)
        inputs = PairInputs(ForwardBatch(chunks, self._block_size), features, self._kv_cache)
        if is_tree:
            head = cast(WholeTreeHead, self._whole_head)
            trees = head.draft_trees(inputs, sizes, of_chunks)
            for member, draft in zip(members, drafts, strict=True):
                draft.set_tree(trees[member])
            return True
        counts = [size.num_nodes for size in sizes]
        found = self._whole_head.draft(inputs, counts, of_chunks)
        for member, draft in zip(members, drafts, strict=True):
            draft.token_ids.extend(found[member])
        return True

    def _new_draft(self, row: StepRow, num_tokens: int) -> PartialDraft:
        """Return an empty draft; it will end where a token of the target still fits after it."""
        num_wanted = min(row.drafting.num_next, self._max_model_len - 1 - num_tokens)
        depth = min(num_wanted, row.drafting.next_depth or num_wanted)
        if self.head.max_draft_tokens is not None:
            depth = min(depth, self.head.max_draft_tokens)
        if not row.drafting.next_depth or self._lacks_slots(num_tokens, num_wanted, depth):
            num_wanted = depth
        return PartialDraft(row.seq_id, num_tokens, num_wanted, depth)

    def _lacks_slots(self, num_tokens: int, num_nodes: int, depth: int) -> bool:
        """Return whether a tree runs more nodes than there are slots up to the longest sequence.

        It may run more than it keeps, in blocks that end at `max_model_len`.
        """
        if not self._runs_nodes or depth < 1:
            return False
        return num_tokens + num_growth_slots(num_nodes, depth) > self._max_model_len

    def _begin(
        self, chunks: Sequence[Chunk], features: Tensor, drafts: Sequence[PartialDraft]
    ) -> HeadState:
        longest = max((each.depth for each in drafts), default=0)
        pairs = ForwardBatch(chunks, self._block_size)
        return self.head.begin(pairs, features, self._kv_cache, longest)

    def _continue(
        self, state: HeadState, num_rows: int, rows: Sequence[int], drafts: Sequence[PartialDraft]
    ) -> None:
        """Draft chains and trees. rows: of the state's `num_rows`, for each draft, in order."""
        pairs = list(zip(rows, drafts, strict=True))
        chains = [(row, draft) for row, draft in pairs if not draft.is_tree]
        trees = [(row, draft) for row, draft in pairs if draft.is_tree]
        for draft_all, members in ((self._extend, chains), (self._trees.draft, trees)):
            if members:
                selected = [row for row, _ in members]
                is_whole = len(selected) == num_rows
                own = state if is_whole else self.head.select(state, selected)
                draft_all(own, [draft for _, draft in members])

    def _extend(self, state: HeadState, drafts: Sequence[PartialDraft]) -> None:
        """Draft chains token by token; state: of the sequences of `drafts`, in order.

        A draft ends where the head's logits are not numbers.
        """
        index = 0
        while drafts:
            logits = self.head.logits(state, index)
            selected = self._sampler.select(logits, drafts)
            if self._has_confidences:
                self._sampler.note_confidences(logits, drafts, selected)
            going = list[int]()
            for place, (draft, token_id) in enumerate(zip(drafts, selected, strict=True)):
                if token_id is not None:
                    draft.token_ids.append(token_id)
                    if not draft.is_complete:
                        going.append(place)
            if len(going) < len(drafts):
                drafts = [drafts[place] for place in going]
                state = self.head.select(state, going) if going else None
            if drafts:
                state = self.head.advance(state, [each.token_ids[-1] for each in drafts], index)
            index += 1


def _with_draft(row: VerifiedRow, draft: PartialDraft | None) -> VerifiedRow:
    if draft is None:
        return row._replace(next_draft_token_ids=(), next_draft_parents=None)
    return row._replace(
        next_draft_token_ids=tuple(draft.token_ids),
        next_draft_parents=draft.parents,
        next_draft_confidences=tuple(draft.confidences),
    )
