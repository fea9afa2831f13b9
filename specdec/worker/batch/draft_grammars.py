"""Grammar matchers of a draft rank's sequences, so that drafts respect structured output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.grammar.matcher import TokenMatcher
from specdec.types.errors import GrammarError, SpecdecError
from specdec.types.messages import SequenceAdmission, StepInput


class _Follower:
    """The matcher of one sequence, and the output tokens that it has consumed."""

    def __init__(self, matcher: TokenMatcher, num_prompt_tokens: int) -> None:
        self.matcher = matcher
        self._num_prompt_tokens = num_prompt_tokens
        self._tokens: list[int] = []

    def move_to(self, start: int, token_ids: tuple[int, ...]) -> None:
        """Move to the end of `token_ids`, whose first token has index `start` in the sequence."""
        begin = max(start - self._num_prompt_tokens, 0)
        assert begin <= len(self._tokens), (begin, len(self._tokens))
        output = token_ids[max(self._num_prompt_tokens - start, 0) :]
        num_kept = begin
        for known, token in zip(self._tokens[begin:], output, strict=False):
            if known != token:
                break
            num_kept += 1
        self.matcher.rollback(len(self._tokens) - num_kept)
        del self._tokens[num_kept:]
        for token in output[num_kept - begin :]:
            self.matcher.advance(token)
            self._tokens.append(token)


class DraftGrammars:
    """Matchers of the sequences that were admitted with a grammar; the others have no masks.

    A grammar that fails is dropped silently: a draft without a mask is valid, but less often
    accepted. All ranks agree, since they get the same steps and compile without a time limit.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Start empty; `compiler` must have no time limit."""
        self._compiler = compiler
        self._followers: dict[int, _Follower] = {}

    def update(self, step: StepInput) -> None:
        """Apply the releases and admissions of a step, and compile new grammars."""
        for seq_id in step.released:
            self._followers.pop(seq_id, None)
        for admission in step.admitted:
            self._admit(admission)

    def move_to(self, seq_id: int, start: int, token_ids: tuple[int, ...]) -> None:
        """Move to the end of `token_ids`, whose first token has index `start` in the sequence."""
        follower = self._followers.get(seq_id)
        if follower is not None:
            try:
                follower.move_to(start, token_ids)
            except GrammarError:
                del self._followers[seq_id]

    def follows(self, seq_id: int) -> bool:
        """Return whether the drafts of a sequence follow a grammar."""
        return seq_id in self._followers

    def is_finished(self, seq_id: int) -> bool:
        """Return whether only an end token is allowed."""
        follower = self._followers.get(seq_id)
        return follower is not None and follower.matcher.is_finished

    def mask(self, seq_id: int) -> NDArray[np.int32] | None:
        """Return the tokens that are allowed next, int32 [1, num_words]; None allows all."""
        follower = self._followers.get(seq_id)
        if follower is None:
            return None
        try:
            return follower.matcher.copy().allowed_mask()[np.newaxis]
        except GrammarError:
            del self._followers[seq_id]
            return None

    def _admit(self, admission: SequenceAdmission) -> None:
        if admission.grammar is None:
            return
        try:
            matcher = self._compiler.compile(admission.grammar).matcher()
        except SpecdecError:
            return
        self._followers[admission.seq_id] = _Follower(matcher, admission.num_prompt_tokens)
        self.move_to(admission.seq_id, 0, admission.token_ids)
