"""Drafts of a draft model in one call of its kernels, instead of a pass for each token.

A call has no operators of torch between its passes, which for a small model take longer than the
passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.models.loading import WholeDraftDecoder
from specdec.sampling.sampling_batch import is_cut
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.draft_messages import DraftRow
from specdec.types.messages import BASE_MODEL, StepRow
from specdec.worker.batch.batch_state import BatchState, TokenSpan


class WholeDrafts:
    """Drafts for sequences whose tokens are samples of the draft model's own logits."""

    def __init__(
        self, model: WholeDraftDecoder, kv_cache: Tensor, state: BatchState, shard: VocabShard
    ) -> None:
        """shard: this rank's shard of the draft model's vocabulary."""
        assert model.can_draft
        self._model, self._kv_cache = model, kv_cache
        self._state, self._shard = state, shard

    def fits(self, row: DraftRow) -> bool:
        """Return whether the kernels can draft for a sequence of plain drafts.

        They cannot where biases or masks change its logits, with an adapter, and where a shard is
        cut over several ranks.
        """
        is_edited = not self._state.has_plain_logits(row.seq_id)
        if is_edited or row.adapter_id != BASE_MODEL or row.num_draft_tokens == 0:
            return False
        params = self._state.sampling_batch([_first_span(row)]).params
        return self._shard.group.size == 1 or not is_cut(params).any()

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, list[int]]:
        """Return the drafts of sequences that fit, by id.

        A draft ends before a token whose logits are invalid. A collective call.
        """
        if not rows:
            return {}
        batch = self._state.forward_batch([_step_row(row) for row in rows])
        params = self._state.sampling_batch([_first_span(row) for row in rows]).params
        counts = [row.num_draft_tokens for row in rows]
        drafts = self._model.draft(batch, self._kv_cache, counts, params)
        return {row.seq_id: draft for row, draft in zip(rows, drafts, strict=True)}


def _step_row(row: DraftRow) -> StepRow:
    """Return the row of the tokens that the model has not run."""
    return StepRow(row.seq_id, row.num_computed_tokens, row.token_ids, 0, samples=True)


def _first_span(row: DraftRow) -> TokenSpan:
    return TokenSpan(row.seq_id, row.first_index)
