"""Start-up probe of a draft head: whether its drafts fit the target.

A head whose files were misread (another numbering of layers, other norms, another rope) or that
belongs to another target still drafts, and only its acceptance shows that it is wrong. The probe
has the target continue short texts, without drafts, and compares each token with the one that the
head drafted for its position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.config.engine import EngineConfig
from specdec.models.heads.config import HeadConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import BadLogitsError
from specdec.types.messages import RowDrafting, StepInput, StepRow, VerifiedRow
from specdec.types.ranks import Target
from specdec.types.trial_sequences import TrialSequences

LOW_ACCEPTANCE = 0.4

_PROMPTS = (
    "The harbour was quiet in the early morning. The fishermen had left before sunrise, and",
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "Question: Why does ice float on water?\nAnswer: Ice floats on water because",
)
_NUM_TOKENS = 32
"""Tokens that the target writes after each prompt."""
_MAX_PROMPT_TOKENS = 64
_BUDGET_S = 1.5
_MIN_COMPARED = 12
"""Fewer drafts do not show whether the acceptance is low."""
_MARGIN = 0.3
"""A neighbouring token is the one that is drafted if it is found this much more often."""


@dataclass(frozen=True)
class ProbeResult:
    """Shares of the compared positions at which the head drafted a certain token.

    num_positions: that were compared. acceptance: the target's token of that position. early, late:
    the token one position before or after, as a head drafts whose outputs are taken for those of
    another position. missing: none, since the head's logits are NaN or infinite.
    """

    num_positions: int
    acceptance: float
    early: float
    late: float
    missing: float

    @property
    def is_low(self) -> bool:
        """Return whether the acceptance is below that of a head that fits.

        By more than its standard error, since a slow target leaves time for few positions.
        """
        error = math.sqrt(LOW_ACCEPTANCE * (1 - LOW_ACCEPTANCE) / self.num_positions)
        return self.acceptance < LOW_ACCEPTANCE - error

    @property
    def is_sound(self) -> bool:
        """Return whether nothing calls for a warning."""
        return not self.is_low and self.missing == 0

    def describe(self) -> str:
        """Return the acceptance for the log."""
        return (
            f"{self.acceptance:.0%} of the first draft tokens are those of the target "
            f"({self.num_positions} positions)"
        )


@dataclass
class _Text:
    """A sequence of the probe. drafted: the draft for the token at a position; None without one."""

    seq_id: int
    tokens: list[int]
    drafted: dict[int, int | None] = field(default_factory=dict)
    is_ended: bool = False

    @property
    def num_written(self) -> int:
        """Number of tokens of the target after the prompt: there is a draft after each."""
        return len(self.drafted)


class _Chunk(NamedTuple):
    """The tokens of a text from `start` to `end`; the head drafts if they are the last."""

    text: _Text
    start: int
    end: int

    @property
    def row(self) -> StepRow:
        tokens = self.text.tokens
        return StepRow(
            self.text.seq_id,
            self.start,
            tuple(tokens[self.start : self.end]),
            0,
            samples=self.end == len(tokens),
            drafting=RowDrafting(num_next=1),
        )


@dataclass(frozen=True)
class HeadProbe:
    """Probe of the head on a target without sequences, whose state it leaves empty.

    eos_token_ids: end a text.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    clock: Callable[[], float] = time.monotonic

    def measure(self, target: Target) -> ProbeResult | None:
        """Return the result; None where the texts are too short to have one.

        It takes at most 1.5 seconds, or the steps that a result needs where these take longer.
        Raises TargetFailedError, and BadLogitsError where the target's own logits are NaN or
        infinite.
        """
        texts, started_at_s = self._texts(), self.clock()
        if not texts:
            return None
        sequences = self._sequences(texts)
        self._run(target, sequences.admit())
        try:
            self._run_prompts(target, texts)
            for _ in range(self._num_tokens):
                is_late = self.clock() - started_at_s > _BUDGET_S
                open_texts = [each for each in texts if not each.is_ended]
                if not open_texts or (is_late and len(_compared(texts)) >= _MIN_COMPARED):
                    break
                self._decode(target, open_texts)
        finally:
            self._run(target, sequences.release())
        return _result(texts)

    @property
    def _num_tokens(self) -> int:
        return min(_NUM_TOKENS, self.config.max_model_len // 2 - 1)

    def _texts(self) -> list[_Text]:
        """Return the prompts that fit into the limits of the engine."""
        longest = min(_MAX_PROMPT_TOKENS, self.config.max_model_len - self._num_tokens - 2)
        num_blocks = -(-self._num_slots // self.config.block_size)
        count = min(self.config.max_num_seqs, self.config.num_blocks // num_blocks)
        prompts = [self.tokenizer.encode(each)[:longest] for each in _PROMPTS[:count]]
        present = (each for each in prompts if each)
        return [_Text(index, [*each]) for index, each in enumerate(present)]

    @property
    def _num_slots(self) -> int:
        """Slots of a text, with one for the draft after it."""
        return min(_MAX_PROMPT_TOKENS + _NUM_TOKENS + 2, self.config.max_model_len)

    def _sequences(self, texts: Sequence[_Text]) -> TrialSequences:
        return TrialSequences(
            [tuple(each.tokens) for each in texts],
            self._num_slots,
            self.config.block_size,
            self.config.num_blocks,
        )

    def _run_prompts(self, target: Target, texts: Sequence[_Text]) -> None:
        """Run the prompts in as few steps as the engine's limit allows."""
        # A head with KV runs a pair more than a chunk after another one has tokens.
        limit = max(1, self.config.max_num_batched_tokens - 1)
        chunks, room = list[_Chunk](), limit
        for text in texts:
            start, end = 0, len(text.tokens)
            while start < end:
                chunks.append(_Chunk(text, start, min(end, start + room)))
                room -= chunks[-1].end - start
                start = chunks[-1].end
                if room == 0:
                    self._step(target, chunks)
                    chunks, room = [], limit
        if chunks:
            self._step(target, chunks)

    def _decode(self, target: Target, texts: Sequence[_Text]) -> None:
        """Run the last token of each text."""
        chunks = [_Chunk(each, len(each.tokens) - 1, len(each.tokens)) for each in texts]
        size = self.config.max_num_batched_tokens
        for first in range(0, len(chunks), size):
            self._step(target, chunks[first : first + size])

    def _step(self, target: Target, chunks: Sequence[_Chunk]) -> None:
        """Run a step, and add what the target and the head yield to the texts."""
        texts = {each.text.seq_id: each.text for each in chunks}
        rows = tuple(each.row for each in chunks)
        for row in self._run(target, StepInput(0, (), (), (), rows)):
            self._append(texts[row.seq_id], row)

    def _append(self, text: _Text, row: VerifiedRow) -> None:
        if row.has_bad_logits:
            raise BadLogitsError(text.num_written)
        text.tokens.extend(row.token_ids)
        text.is_ended = row.token_ids[-1] in self.eos_token_ids
        text.drafted[len(text.tokens)] = next(iter(row.next_draft_token_ids), None)

    @staticmethod
    def _run(target: Target, step: StepInput) -> Sequence[VerifiedRow]:
        target.begin(step)
        return target.collect().rows


def _compared(texts: Sequence[_Text]) -> list[tuple[int | None, list[int]]]:
    """Return each draft with the tokens before, at and after its position, where all are known."""
    return [
        (drafted, text.tokens[position - 1 : position + 2])
        for text in texts
        for position, drafted in text.drafted.items()
        if position + 1 < len(text.tokens)
    ]


def _result(texts: Sequence[_Text]) -> ProbeResult | None:
    compared = _compared(texts)
    if len(compared) < _MIN_COMPARED:
        return None
    before, at, after = (
        sum(drafted == around[place] for drafted, around in compared) / len(compared)
        for place in range(3)
    )
    missing = sum(drafted is None for drafted, _ in compared) / len(compared)
    return ProbeResult(len(compared), at, before, after, missing)


def likely_causes(result: ProbeResult, head: HeadConfig, model: str) -> tuple[str, ...]:
    """Return what may be the cause of a result that is not sound, by the files and the drafts.

    model: the name of the target that is served.
    """
    causes = []
    if result.missing:
        causes.append(f"its logits are NaN or infinite at {result.missing:.0%} of the positions")
    if result.late > result.acceptance + _MARGIN:
        causes.append(
            "it drafts the token one position too far: the file may predict from the last known "
            "token (sample_from_anchor)"
        )
    if result.early > result.acceptance + _MARGIN:
        causes.append("it repeats the token before: its outputs may belong to a position earlier")
    if head.target_name is not None and _base(head.target_name) != _base(model):
        causes.append(f"its files name the target {head.target_name}, and {model} is served")
    return (*causes, *head.reading.notes)


def _base(name: str) -> str:
    """Return the last part of a model's name or path, without a revision."""
    return name.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
