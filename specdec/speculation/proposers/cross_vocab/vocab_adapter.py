"""Adapters between the vocabulary of the target and that of a draft model."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers.cross_vocab.retokenizer import Retokenizer
from specdec.text.vocab_bytes import VocabBytes, split_text
from specdec.text.vocab_map import VocabularyMap, drafts_text
from specdec.types.messages import SequenceAdmission

_STAND_IN = 0
"""Token that replaces those that the draft model lacks: special ones, or ones without text."""

_MAX_READ_TOKENS = 2048
"""Most tokens to encode in one call, so that a long prompt does not delay other requests."""

_MAX_DRAFT_PER_TARGET_TOKEN = 2.0


@dataclass(frozen=True)
class DraftView:
    """A sequence in the draft model's tokens.

    token_ids: in the draft's vocabulary; the list grows with later views.
    num_kept: number of leading tokens that are unchanged since the view before.
    num_settled: number of leading tokens that will never change.
    is_whole: whether the view reaches the sequence's end.
    """

    token_ids: list[int]
    num_kept: int
    num_settled: int
    is_whole: bool = True


class VocabAdapter:
    """Converts between the tokens of the target and those of a draft model, for every sequence.

    This one is the identity, for equal vocabularies; the others derive from it. A sequence's tokens
    only ever grow, until it is released.
    """

    def view(self, seq: Sequence) -> DraftView:
        """Return the sequence in the draft's tokens; a long one takes several calls."""
        return DraftView(seq.token_ids, seq.num_tokens, seq.num_tokens)

    def num_draft_tokens(self, seq: Sequence, max_tokens: int) -> int:
        """Return how many tokens to draft for `max_tokens` of the target's."""
        del seq
        return max_tokens

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the target's tokens, at most `max_tokens`, of drafted ones that continue `seq`."""
        del seq, max_tokens
        return tuple(token_ids)

    def drafts_ahead(self, seq: Sequence) -> bool:
        """Return whether the draft model can continue drafts of a sequence token by token."""
        del seq
        return True

    def to_draft(self, token_ids: collections.abc.Sequence[int]) -> tuple[int, ...]:
        """Return the draft model's tokens of drafts, one for each, where `drafts_ahead` holds."""
        return tuple(token_ids)

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return the admission of a sequence to the draft worker, in the draft's vocabulary."""
        return seq.draft_admission

    def release(self, seq_id: int) -> None:
        """Drop the state of a sequence; an unknown one is no error."""


class EqualIds(VocabAdapter):
    """Adapter for equal text tokens with other special tokens or another padding.

    Example: Qwen's models, whose vocabularies are padded to different sizes.
    """

    def __init__(self, vocabulary: VocabularyMap) -> None:
        self._to_draft = vocabulary.target_to_draft
        self._to_target = vocabulary.draft_to_target
        self._views: dict[int, list[int]] = {}

    def view(self, seq: Sequence) -> DraftView:
        """Return the sequence's own tokens, with a stand-in where the draft lacks one."""
        token_ids = self._views.setdefault(seq.seq_id, [])
        num_kept = len(token_ids)
        token_ids.extend(_with_stand_ins(self._to_draft[seq.token_ids[num_kept:]]))
        return DraftView(token_ids, num_kept, len(token_ids))

    def to_target(
        self, seq: Sequence, token_ids: collections.abc.Sequence[int], max_tokens: int
    ) -> tuple[int, ...]:
        """Return the tokens up to the first that the target lacks."""
        del seq, max_tokens
        return known_prefix(self._to_target[list(token_ids)].tolist())

    def to_draft(self, token_ids: collections.abc.Sequence[int]) -> tuple[int, ...]:
        """Return the same tokens, with a stand-in where the draft lacks one."""
        return _with_stand_ins(self._to_draft[list(token_ids)])

    def admission(self, seq: Sequence) -> SequenceAdmission:
        """Return the full admission, or a plain one if the draft lacks one of the tokens."""
        if (self._to_draft[seq.token_ids] < 0).any():
            return plain_admission(seq)
        admission = seq.draft_admission
        token_ids = self._to_draft[list(admission.token_ids)].tolist()
        return replace(admission, token_ids=tuple(token_ids))

    def release(self, seq_id: int) -> None:
        """Drop a sequence's tokens."""
        self._views.pop(seq_id, None)


@dataclass
class _State:
    """text: the sequence's first `num_read` tokens in the draft's vocabulary."""

    text: Retokenizer
    num_read: int


class CrossVocabAdapter(VocabAdapter):
    """Adapter between two tokenizers, by text.

    The draft model's own tokenizer encodes the text so far. Its drafts are converted to the
    target's tokens in one of two ways of Timor et al., arXiv 2502.05202:

    - At a temperature above 0 it samples from the tokens that both vocabularies have, which are
      mapped one by one (token-level intersection, TLI). Sampling can be coupled, with the noise of
      the target's token ids.
    - At temperature 0 it drafts freely, and the target's tokenizer encodes the drafted text
      (string-level exact match, SLEM).

    Both are lossless, since the target verifies; they differ in acceptance.
    """

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

    def drafts_ahead(self, seq: Sequence) -> bool:
        """Return False: a draft that is accepted in part may be other tokens in the longer text."""
        del seq
        return False

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


def _with_stand_ins(token_ids: NDArray[np.int32]) -> tuple[int, ...]:
    return tuple(np.where(token_ids < 0, _STAND_IN, token_ids).tolist())


def plain_admission(seq: Sequence) -> SequenceAdmission:
    """Return an admission for any vocabulary: no logits processors by token, lower acceptance."""
    return SequenceAdmission(seq.seq_id, seq.num_prompt_tokens, seq.rules.without_tokens)


def known_prefix(token_ids: collections.abc.Sequence[int]) -> tuple[int, ...]:
    """Return the ids before the first -1."""
    end = next((index for index, token in enumerate(token_ids) if token < 0), len(token_ids))
    return tuple(token_ids[:end])
