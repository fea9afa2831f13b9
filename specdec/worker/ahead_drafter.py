"""Drafts of a draft model after the possible outcomes of drafts that the target verifies.

One pass runs the drafts in flight and gives the model's distribution after each. For each number of
accepted drafts its likeliest other tokens become *branches*: a tree after the last known token, in
which the next passes extend all branches by a token each. The KV of a tree is scratch: the branch
that occurs is run again as text, together with the next drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.loading import Decoder
from specdec.types.draft_messages import AheadDraft, AheadOutput, AheadRow, Continuation, DraftPass
from specdec.types.messages import StepRow
from specdec.worker.batch.batch_state import BatchState, TokenSpan
from specdec.worker.batch.draft_grammars import DraftGrammars
from specdec.worker.draft_sampler import DraftSampler, PartialDraft


@dataclass
class _Branch:
    """The continuation of one outcome. node: the last one of its path that has KV."""

    row: AheadRow
    num_accepted: int
    token_id: int
    node: int
    draft: PartialDraft = field(default_factory=PartialDraft)

    @property
    def path(self) -> tuple[int, ...]:
        """Tokens after the known ones: accepted drafts, the target's token, its continuation."""
        accepted = self.row.drafts[: self.num_accepted]
        return (*accepted, self.token_id, *self.draft.token_ids)

    @property
    def is_complete(self) -> bool:
        return len(self.draft.token_ids) >= self.row.num_draft_tokens

    def finished(self) -> Continuation:
        drafted = tuple(self.draft.token_ids)
        return Continuation(self.num_accepted, self.token_id, drafted, self.draft.draft_probs)


class _Place(NamedTuple):
    """A place whose token is to be drafted: after a path of one row's tree."""

    row: AheadRow
    path: tuple[int, ...]

    @property
    def span(self) -> TokenSpan:
        return TokenSpan(self.row.seq_id, self.row.first_index + len(self.path))


@dataclass
class _Tree:
    """The tree of one row. parents: of the nodes that have KV, the drafts in flight first."""

    row: AheadRow
    branches: list[_Branch] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parents = list(range(-1, self.row.num_drafts - 1))

    def add(self, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Add branches for the likeliest tokens, best first, after `num_accepted` drafts.

        The draft at that place is no outcome: it would be accepted.
        """
        drafted = self.row.drafts[num_accepted : num_accepted + 1]
        others = [token_id for token_id in token_ids if token_id not in drafted]
        for token_id in others[: self.row.fan_out[num_accepted]]:
            self.branches.append(_Branch(self.row, num_accepted, token_id, num_accepted - 1))

    def chunk(self, branches: Sequence[_Branch], block_table: array[int]) -> Chunk:
        """Return the pass that runs the last token of each of `branches`, and note its nodes."""
        start = self.row.num_known_tokens + len(self.parents)
        for branch in branches:
            self.parents.append(branch.node)
            branch.node = len(self.parents) - 1
        tokens = [branch.path[-1] for branch in branches]
        adapter_id = self.row.adapter_id
        return Chunk(tokens, start, block_table, tuple(self.parents), adapter_id)


class AheadDrafter:
    """Drafts ahead on one rank of a draft model; its calls are collective."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: Tensor,
        block_size: int,
        batch_state: BatchState,
        grammars: DraftGrammars,
        sampler: DraftSampler,
        group: TensorParallelGroup,
        clock: Callable[[], float],
    ) -> None:
        """clock: for the seconds of passes."""
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._batch_state = batch_state
        self._grammars = grammars
        self._sampler = sampler
        self._group = group
        self._clock = clock

    def draft(
        self, step_id: int, rows: Sequence[AheadRow], is_interrupted: Callable[[], bool]
    ) -> AheadOutput:
        """Return the continuations of the likeliest outcomes of each row.

        The first pass always runs, since the engine counts on the KV of the drafts in flight. The
        others end when `is_interrupted`; branches are then shorter.
        """
        trees, passes = [_Tree(row) for row in rows], list[DraftPass]()
        began_at_s = self._clock()
        self._branch(trees)
        passes.append(self._timed(sum(len(row.token_ids) for row in rows), began_at_s))
        going = [branch for tree in trees for branch in tree.branches]
        while going and not self._agree(is_interrupted()):
            began_at_s, num_tokens = self._clock(), len(going)
            going = self._extend(trees, going)
            passes.append(self._timed(num_tokens, began_at_s))
        self._follow(rows)
        drafts = tuple(
            AheadDraft(tree.row.seq_id, tuple(each.finished() for each in tree.branches))
            for tree in trees
        )
        return AheadOutput(step_id, drafts, tuple(passes), is_whole=not going)

    def _follow(self, rows: Sequence[AheadRow]) -> None:
        """Move histories and grammars to the end of the drafts in flight, which have KV.

        The next step of a sequence begins at or before that place.
        """
        for row in rows:
            self._grammars.move_to(row.seq_id, row.num_computed_tokens, row.token_ids)
        self._batch_state.update_histories(
            [StepRow(row.seq_id, row.num_computed_tokens, row.token_ids, 0, True) for row in rows]
        )

    def _timed(self, num_tokens: int, began_at_s: float) -> DraftPass:
        return DraftPass(num_tokens, self._clock() - began_at_s)

    def _agree(self, is_interrupted: bool) -> bool:
        """Return whether any rank is interrupted."""
        if self._group.size == 1:
            return is_interrupted
        flag = torch.tensor([float(is_interrupted)], device=self._kv_cache.device)
        return bool(self._group.all_reduce(flag).item() > 0)

    def _branch(self, trees: Sequence[_Tree]) -> None:
        """Run the drafts in flight, and add the branches of each tree."""
        rows = [tree.row for tree in trees]
        self._batch_state.update_histories(
            [StepRow(row.seq_id, row.num_computed_tokens, row.known, 0, True) for row in rows]
        )
        hidden = self._run([self._chunk(row) for row in rows])
        owners = [tree for tree in trees for count in tree.row.fan_out if count]
        places = [place for row in rows for place in _branching_places(row)]
        last = accumulate((len(row.token_ids) for row in rows), initial=-1)
        indices = [
            end - row.num_drafts + len(place.path)
            for row, end in zip(rows, islice(last, 1, None), strict=True)
            for place in _branching_places(row)
        ]
        logits = self._shaped(self._model.compute_logits(hidden[indices]), places)
        most = 1 + max(count for row in rows for count in row.fan_out)
        likeliest = self._sampler.likeliest(logits, [place.span for place in places], most)
        for tree, place, token_ids in zip(owners, places, likeliest, strict=True):
            tree.add(len(place.path), token_ids)

    def _extend(self, trees: Sequence[_Tree], going: Sequence[_Branch]) -> list[_Branch]:
        """Run the last token of each branch and draft the next one; return those to continue."""
        by_sequence: dict[int, list[_Branch]] = {}
        for branch in going:
            if not self._is_finished(branch):
                by_sequence.setdefault(branch.row.seq_id, []).append(branch)
        branches = [branch for own in by_sequence.values() for branch in own]
        if not branches:
            return []
        of_sequence = {tree.row.seq_id: tree for tree in trees}
        chunks = [
            of_sequence[seq_id].chunk(own, self._table(seq_id))
            for seq_id, own in by_sequence.items()
        ]
        places = [_Place(branch.row, branch.path) for branch in branches]
        logits = self._shaped(self._model.compute_logits(self._run(chunks)), places)
        drafts = [branch.draft for branch in branches]
        extended = self._sampler.extend(logits, [place.span for place in places], drafts)
        return [branches[index] for index in extended if not branches[index].is_complete]

    def _chunk(self, row: AheadRow) -> Chunk:
        """Return the pass over the last known tokens of a row and its drafts in flight."""
        table, adapter_id = self._table(row.seq_id), row.adapter_id
        return Chunk(row.token_ids, row.num_computed_tokens, table, adapter_id=adapter_id)

    def _run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the hidden states of all tokens of chunks."""
        return self._model(ForwardBatch(chunks, self._block_size), self._kv_cache)

    def _shaped(self, logits: Tensor, places: Sequence[_Place]) -> Tensor:
        """Apply what the sequences' rules and grammars do to the logits at places."""
        masks = [self._mask(place) for place in places]
        ends = [(place.row.seq_id, place.row.first_index, place.path) for place in places]
        return self._batch_state.draft_logits_processor(ends, masks).apply(logits)

    def _mask(self, place: _Place) -> NDArray[np.int32] | None:
        """Return the tokens that a grammar allows at a place; None for all."""
        self._move_grammar(place)
        mask = self._grammars.mask(place.row.seq_id)
        return None if mask is None else mask[0]

    def _is_finished(self, branch: _Branch) -> bool:
        """Return whether a grammar allows only an end token after a branch."""
        self._move_grammar(_Place(branch.row, branch.path))
        return self._grammars.is_finished(branch.row.seq_id)

    def _move_grammar(self, place: _Place) -> None:
        row = place.row
        self._grammars.move_to(row.seq_id, row.num_computed_tokens, row.known + place.path)

    def _table(self, seq_id: int) -> array[int]:
        return self._batch_state.block_table(seq_id)


def _branching_places(row: AheadRow) -> list[_Place]:
    """Return the places whose likeliest tokens become branches, by number of accepted drafts."""
    return [_Place(row, row.drafts[:index]) for index, count in enumerate(row.fan_out) if count]
