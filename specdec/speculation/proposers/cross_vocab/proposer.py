"""Drafting with a model whose tokenizer differs from the target's.

The draft model's own tokenizer encodes the text so far. Its drafts are converted to the target's
tokens in one of two ways of Timor et al., arXiv 2502.05202:

- At a temperature above 0 it samples from the tokens that both vocabularies have, which are mapped
  one by one (token-level intersection, TLI). Sampling can be coupled, with the noise of the
  target's token ids.
- At temperature 0 it drafts freely, and the target's tokenizer encodes the drafted text
  (string-level exact match, SLEM).

Both are lossless, since the target verifies; they differ in acceptance.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers.cross_vocab.retokenizer import Retokenizer
from specdec.speculation.proposers.cross_vocab.vocab_adapter import (
    DraftView,
    known_prefix,
    plain_admission,
)
from specdec.text.vocab_bytes import VocabBytes, split_text
from specdec.text.vocab_map import VocabularyMap, drafts_text
from specdec.types.messages import SequenceAdmission

_MAX_READ_TOKENS = 2048
"""Most tokens to encode in one call, so that a long prompt does not delay other requests."""

_MAX_DRAFT_PER_TARGET_TOKEN = 2.0


@dataclass
class _State:
    """text: the sequence's first `num_read` tokens in the draft's vocabulary."""

    text: Retokenizer
    num_read: int


class CrossVocabAdapter:
    """Adapter between two tokenizers, by text."""

    def __init__(self, vocabulary: VocabularyMap, draft: VocabBytes, target: VocabBytes) -> None:
        self._to_target = vocabulary.draft_to_target
        self._draft = draft
        self._target = target
        self._states: dict[int, _State] = {}

    def view(self, seq: Sequence) -> DraftView:
        """Return the text in the draft's tokens."""
        state = self._states.get(seq.seq_id)
        if state is None:
            state = _State(Retokenizer(self._draft), self._num_prefix(seq))
            self._states[seq.seq_id] = state
        end = min(seq.num_tokens, state.num_read + _MAX_READ_TOKENS)
        state.text.extend(self._text(seq, state.num_read, end))
        state.num_read = end
        text = state.text
        is_whole = end == seq.num_tokens and bool(text.token_ids)
        return DraftView(text.token_ids, text.num_kept, text.num_settled, is_whole)

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """Return the number that the same length of text has had so far; for TLI, `max_tokens`."""
        if not drafts_text(seq.rules):
            return max_tokens
        ratio = len(self._states[seq.seq_id].text.token_ids) / seq.num_tokens
        return max(1, round(max_tokens * min(ratio, _MAX_DRAFT_PER_TARGET_TOKEN)))

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the target's tokens of the drafted text, or for TLI of the drafted tokens."""
        if not drafts_text(seq.rules):
            return known_prefix(self._to_target[list(token_ids)].tolist())
        return tuple(self._encoded(token_ids)[:max_tokens])

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return an admission without token ids."""
        return plain_admission(seq)

    def release(self, seq_id: int) -> None:
        """Drop a sequence's text."""
        self._states.pop(seq_id, None)

    def _num_prefix(self, seq: Sequence) -> int:
        """Return the length of the target's prefix; the draft's tokenizer adds its own."""
        prefix = self._target.prefix
        return len(prefix) if tuple(seq.token_ids[: len(prefix)]) == prefix else 0

    def _text(self, seq: Sequence, start: int, end: int) -> bytes:
        text = self._target.text(seq.token_ids[start:end])
        is_first = start == self._num_prefix(seq)
        return text.removeprefix(b" ") if is_first and self._target.adds_space else text

    def _encoded(self, token_ids: collections.abc.Sequence[int]) -> list[int]:
        """Return the text up to the first special token, then that one if the target has it too."""
        is_text = [self._draft.is_text(token) for token in token_ids]
        num_text = is_text.index(False) if False in is_text else len(token_ids)
        pieces, rest = split_text(self._draft.text(token_ids[:num_text]))
        encoded = [token for piece in (*pieces, rest) for token in self._encode(piece)]
        end = self._to_target[list(token_ids[num_text : num_text + 1])]
        return [*encoded, *known_prefix(end.tolist())]

    def _encode(self, piece: str | bytes) -> list[int]:
        if isinstance(piece, str):
            return self._target.encode_inside(piece)
        return self._target.encode_bytes(piece)
