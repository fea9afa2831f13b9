"""Measures a drafter in the engine that serves it: acceptance length and speed, by suite.

Each prompt is answered twice at each temperature, with drafts and without, one request at a time
and in alternating order, so that other load on the machine affects both alike. Both have the same
seed, so a lossless verifier gives the same answer twice; answers that differ are counted.
"""

from __future__ import annotations

import logging
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from specdec.llm import LLM, Counter, RequestOutput, TokensPrompt
from specdec.text.tokenizer import Tokenizer
from specdec.training.data.prompts import PromptRecord
from specdec.types.errors import ContextLengthError, InvalidValueError
from specdec.types.reports.additive import Additive
from specdec.types.request import ChatMessage
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.validation import require_range

logger = logging.getLogger(__name__)

_DRAFTED = "spec_decode_num_draft_tokens_by_method"
_ACCEPTED = "spec_decode_num_accepted_tokens_by_method"


@dataclass(frozen=True)
class EvaluationConfig:
    """How to measure.

    temperatures: each prompt is answered at each. max_tokens: of an answer.
    mode: of speculation while it drafts: `on` drafts as many tokens as are configured in each step,
        `auto` as many as the policy chooses.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 128
    mode: Literal["on", "auto"] = "on"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise InvalidValueError("temperatures", self.temperatures, "at least one number")
        for temperature in self.temperatures:
            require_range("temperatures", temperature, 0, 100)
        require_range("max_tokens", self.max_tokens, 2, 2**20)  # the rate begins after the first


@dataclass(frozen=True)
class PositionCounts(Additive):
    """Verified and accepted draft tokens by their position in the draft, from 0."""

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of drafts that reach each position of which it is accepted, with all before it."""
        pairs = zip_longest(self.drafted, self.accepted, fillvalue=0)
        return tuple(accepted / drafted if drafted else 0.0 for drafted, accepted in pairs)

    @property
    def num_drafts(self) -> int:
        """Verified drafts."""
        return self.drafted[0] if self.drafted else 0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a step with a draft yields, the target's own included; 1 without drafts."""
        return 1 + (sum(self.accepted) / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 without drafts."""
        num_drafted = sum(self.drafted)
        return sum(self.accepted) / num_drafted if num_drafted else 0.0


@dataclass(frozen=True)
class Answer:
    """One prompt, answered with drafts and without.

    tokens_per_s, baseline_tokens_per_s: after the first token; None without a second one.
    is_same: whether both answers have the same tokens.
    """

    num_tokens: int
    positions: PositionCounts
    tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    is_same: bool

    @property
    def num_steps(self) -> int:
        """Steps of the target with drafts switched on: a token each, beside accepted drafts."""
        num_own = self.num_tokens - 1 - sum(self.positions.accepted)
        return max(self.positions.num_drafts, num_own)  # of the last draft not all may be sent


@dataclass(frozen=True)
class SuiteResult:
    """Results of one suite at one temperature.

    num_steps: of the target with drafts switched on, after the first token of each answer; in some
        a method may have had no draft. num_accepted: draft tokens by their position in the draft.
    mean_accepted_length: tokens that a step with a draft yields, the target's own included.
    acceptance_by_position: share of drafts that were accepted at least that far.
    tokens_per_s, baseline_tokens_per_s, speedup: medians over the prompts, with drafts, without
        them, and of the ratio; None where no answer has two tokens.
    num_other_answers: prompts whose two answers differ, by a tie of two tokens or by a lossy
        verifier.
    """

    suite: str
    temperature: float
    num_prompts: int
    num_tokens: int
    num_steps: int
    num_drafts: int
    num_accepted: tuple[int, ...]
    mean_accepted_length: float
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    speedup: float | None
    num_other_answers: int

    @classmethod
    def of(cls, suite: str, temperature: float, answers: Sequence[Answer]) -> SuiteResult:
        """Combine the answers to the suite's prompts."""
        positions = PositionCounts.sum(each.positions for each in answers)
        timed = [
            (each.tokens_per_s, each.baseline_tokens_per_s)
            for each in answers
            if each.tokens_per_s is not None and each.baseline_tokens_per_s is not None
        ]
        return cls(
            suite=suite,
            temperature=temperature,
            num_prompts=len(answers),
            num_tokens=sum(each.num_tokens for each in answers),
            num_steps=sum(each.num_steps for each in answers),
            num_drafts=positions.num_drafts,
            num_accepted=positions.accepted,
            mean_accepted_length=positions.mean_accepted_length,
            acceptance_rate=positions.acceptance_rate,
            acceptance_by_position=positions.rates,
            tokens_per_s=_median([with_drafts for with_drafts, _ in timed]),
            baseline_tokens_per_s=_median([without for _, without in timed]),
            speedup=_median([with_drafts / without for with_drafts, without in timed]),
            num_other_answers=sum(not each.is_same for each in answers),
        )


class DrafterEvaluation:
    """Measurements of one engine. Nothing else may use it meanwhile."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, config: EvaluationConfig) -> None:
        """llm: with a drafter; raises InvalidValueError where nothing can draft."""
        if llm.speculation is None:
            limit = "a configuration that drafts"
            raise InvalidValueError("speculative_config", None, limit)
        self._llm = llm
        self._control = llm.speculation
        self._tokenizer = tokenizer
        self._config = config

    def run(
        self, prompts: Sequence[PromptRecord], advance: Callable[[], None] = lambda: None
    ) -> list[SuiteResult]:
        """Return the results by suite, in the order of the prompts, and temperature.

        Only the first turn of a prompt is answered. A prompt that is too long is left out with a
        warning; raise ContextLengthError if all are. advance: called after each pair of answers.
        The engine's mode of speculation is restored at the end.
        """
        answers: dict[tuple[str, float], list[Answer]] = {}
        try:
            prompts = self._fitting(prompts)
            self._answer(prompts[0], SamplingParams(max_tokens=8), "on")  # warm-up, not measured
            for index, (record, temperature) in enumerate(self._cells(prompts)):
                measured = self._measure(record, temperature, drafts_first=index % 2 == 0)
                answers.setdefault((record.suite, temperature), []).append(measured)
                advance()
        finally:
            self._llm.set_speculation(mode=self._control.mode)
        return [SuiteResult.of(*cell, each) for cell, each in answers.items()]

    def _fitting(self, prompts: Sequence[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts that leave room for an answer, and log the others."""
        limit = self._llm.max_model_len - self._config.max_tokens
        lengths = [len(self._token_ids(each)) for each in prompts]
        for number, (record, length) in enumerate(zip(prompts, lengths, strict=True), start=1):
            if length > limit:
                text = "prompt %d (%s) is left out: it has %d tokens, above %d"
                logger.warning(text, number, record.suite or "no suite", length, limit)
        if min(lengths) > limit:
            raise ContextLengthError(self._llm.max_model_len, min(lengths), self._config.max_tokens)
        return [each for each, length in zip(prompts, lengths, strict=True) if length <= limit]

    def _cells(self, prompts: Sequence[PromptRecord]) -> Iterator[tuple[PromptRecord, float]]:
        """Yield every prompt at every temperature."""
        for temperature in self._config.temperatures:
            for record in prompts:
                yield record, temperature

    def _measure(self, record: PromptRecord, temperature: float, *, drafts_first: bool) -> Answer:
        params = SamplingParams(
            temperature=temperature, max_tokens=self._config.max_tokens, seed=self._config.seed
        )
        before = self._positions()
        outputs = {
            drafts: self._answer(record, params, self._config.mode if drafts else "off")
            for drafts in (drafts_first, not drafts_first)
        }
        token_ids = [outputs[drafts].outputs[0].token_ids for drafts in (True, False)]
        return Answer(
            num_tokens=len(token_ids[0]),
            positions=self._positions().minus(before),  # nothing drafts where it is off
            tokens_per_s=_tokens_per_s(outputs[True]),
            baseline_tokens_per_s=_tokens_per_s(outputs[False]),
            is_same=token_ids[0] == token_ids[1],
        )

    def _answer(
        self, record: PromptRecord, params: SamplingParams, mode: Literal["on", "auto", "off"]
    ) -> RequestOutput:
        """Answer the first turn, without the caches of other requests."""
        self._llm.set_speculation(mode=mode)
        salt = secrets.token_urlsafe()
        prompt = TokensPrompt(prompt_token_ids=self._token_ids(record), cache_salt=salt)
        [output] = self._llm.generate(prompt, params, use_tqdm=False)
        return output

    def _token_ids(self, record: PromptRecord) -> list[int]:
        """Return the tokens of the first turn: of a chat, or of a text where no template is."""
        if not self._tokenizer.chat_template.plain_text:
            return self._tokenizer.encode(record.turns[0])
        return self._tokenizer.encode_chat([ChatMessage("user", record.turns[0])])

    def _positions(self) -> PositionCounts:
        """Return the engine's counts since its start, over all methods."""
        counts: dict[str, dict[int, int]] = {_DRAFTED: {}, _ACCEPTED: {}}
        for metric in self._llm.get_metrics():
            name = metric.name.partition(":")[2]
            if isinstance(metric, Counter) and name in counts:
                position = int(metric.labels["position"])
                counts[name][position] = counts[name].get(position, 0) + int(metric.value)
        return PositionCounts(
            *(
                tuple(by_position.get(position, 0) for position in range(len(by_position)))
                for by_position in counts.values()
            )
        )


def _tokens_per_s(output: RequestOutput) -> float | None:
    """Return the rate after the first token, which excludes the prompt."""
    first_s, last_s = output.metrics.first_token_ts, output.metrics.last_token_ts
    num_tokens = output.metrics.num_generation_tokens
    if first_s is None or last_s is None or num_tokens < 2 or last_s <= first_s:
        return None
    return (num_tokens - 1) / (last_s - first_s)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
