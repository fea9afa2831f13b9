"""Prompt lookup on the device: the texts of sequences, and the drafts after them.

The host copies the text of a sequence with its first draft. From then on each step appends the
tokens that it verifies, so that the next step takes its drafts before the host has seen either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.ngram import Texts
from specdec.sampling.row_ops import RowOps
from specdec.types.messages import StepRow
from specdec.worker.device.head.head import StepParts
from specdec.worker.device.input.buffers import copy_to_device
from specdec.worker.device.input.input import Word, rows_of
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import Launch, Part, Stage, StepShape
from specdec.worker.head.parts import LookupParts


class LookupLauncher:
    """Texts on the device by the places of a DeviceState, and the launch of drafts after a step.

    stages: of steps, as graphs.
    """

    def __init__(self, parts: LookupParts, step: StepParts, ops: RowOps) -> None:
        """Allocate the texts."""
        self._parts, self._ops = parts, ops
        self._buffers, self._state, self._limits, self._graphs = step
        device, limits = self._buffers.input.device, self._limits
        # The column after the longest text is for tokens that no text has.
        size = (self._state.padding_place + 1, limits.max_model_len + 1)
        self._texts = torch.zeros(size, dtype=torch.int32, device=device)
        self._offsets = torch.arange(limits.max_query_len, device=device)
        self._followed: set[int] = set()  # sequences whose texts are on the device
        self.stages: dict[Stage, Launch] = {Stage(Part.LOOKUP): self._draft}

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Copy the texts of sequences again with their next draft."""
        if self._followed:
            self._followed.difference_update(seq_ids)

    def hold(self, rows: Sequence[StepRow], *, any_wants: bool) -> None:
        """Have the texts of the rows that want a lookup on the device; does not wait.

        The others' texts are not followed any further. any_wants: whether some row wants one.
        Raises torch.OutOfMemoryError.
        """
        self.forget(row.seq_id for row in rows if not _wants_lookup(row))
        wanting = filter(_wants_lookup, rows if any_wants else ())
        lacking = [row.seq_id for row in wanting if self._lacks_text(row)]
        if not lacking:
            return
        tokens = [np.array(self._parts.texts[seq_id], np.int64) for seq_id in lacking]
        for seq_id, own in zip(lacking, copy_to_device(tokens, self._texts.device), strict=True):
            self._texts[self._state.place(seq_id), : len(own)] = own
        self._followed.update(lacking)

    def _lacks_text(self, row: StepRow) -> bool:
        is_followed = row.seq_id in self._followed
        if row.is_pending:
            assert is_followed, "a pending row continues a step that has left its text"
            return False
        return self._parts.texts.follow(row) or not is_followed

    def launch(self, plan: StepPlan) -> None:
        """Launch the lookups after a step, and after what a head drafts."""
        self._graphs.run(Stage(Part.LOOKUP), plan.shape, self._draft)

    @torch.inference_mode()
    def _draft(self, shape: StepShape) -> None:
        """Append the new tokens of the rows that want a lookup, and put drafts that are found.

        The state has the lengths with the new tokens, and what a head has drafted.
        """
        table, results = rows_of(self._buffers.input, shape), self._buffers.results(shape)
        places, counts, tokens = table[:, Word.SLOT], results[:, 0], results[:, 1:]
        ends, wanted = self._state.num_tokens[places], table[:, Word.NUM_LOOKUP]
        wants = (wanted > 0) & (counts > 0)
        self._append(places, ends - counts, tokens, torch.where(wants, counts, 0))
        most = self._limits.max_model_len - 1 - ends  # a token of the target fits after them
        num_wanted = torch.minimum(wanted, most).clamp_min(0) * wants
        texts = Texts(self._texts, places, ends.clamp_max(self._limits.max_model_len))
        held = self._state.held_drafts
        found = self._ops.lookup(texts, num_wanted, self._parts.ngrams, held.shape[1] - 1)
        is_found = found[:, :1] > 0
        drafts = torch.where(is_found, found, held[places])
        held.index_copy_(0, places, drafts)
        output, layout = self._buffers.drafts(shape.num_rows), self._buffers.layout
        output[:, : drafts.shape[1]] = drafts
        layout.lookups(output).copy_(is_found)

    def _append(self, places: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write the first `counts` tokens [num_rows, Q] of each row to its text."""
        most, offsets = self._limits.max_model_len, self._offsets[: tokens.shape[1]]
        index = starts[:, None] + offsets
        is_new = (offsets < counts[:, None]) & (index < most)
        index = index.masked_fill(~is_new, most)
        self._texts.index_put_((places[:, None].expand_as(index), index), tokens.int())


def _wants_lookup(row: StepRow) -> bool:
    return row.samples and row.drafting.num_lookup > 0
