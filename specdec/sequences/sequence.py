"""Requests and their sequences, the engine's state of each choice."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum

from specdec.sequences.block_manager import BlockKey, root_key
from specdec.sequences.output_buffer import OutputBuffer
from specdec.sequences.prediction import PredictedText, PredictionCursor
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.grammar.matcher import Grammar, OutputConstraint
from specdec.types.control import SpeculationControl
from specdec.types.drafters import CONFIGURED_VERSION
from specdec.types.drafts.draft_length import DraftLength
from specdec.types.drafts.draft_survival import AcceptanceHistory, ConfidenceHistory
from specdec.types.messages import (
    BASE_MODEL,
    Logprobs,
    PromptLogprobs,
    SequenceAdmission,
    Snapshot,
)
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import ListedTokens, Replay, SamplingRules

MAX_DRAFT_COMPILE_S = 0.05
"""A grammar that took longer to compile is not sent to draft workers, which would stall."""


AGEING_S = 10.0
"""A request that waits this long gains one level of priority."""


_NO_DRAFTS = SpeculationStats()
_NO_ACCEPTANCE, _NO_CONFIDENCE = AcceptanceHistory(), ConfidenceHistory()


class SequenceStatus(Enum):
    """Lifecycle state of a sequence; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class EngineRequest(GenerateRequest):
    """A request after preprocessing. `seed` fixes all its random choices.

    prompt: the token ids. grammar: the compiled `params.structured_output`. queue_deadline_s: when
    a request that still waits is dropped, by the clock of `Engine.expire`. adapter_id: of the
    adapter to run with; its KV is shared with no other adapter. prediction: that of
    `params.speculation`, as tokens; None without one. detokenize: False leaves outputs without
    text; stop strings need it. is_counted: False for one that no client sends. replay: output to
    compare, which takes the place of the log-probabilities of the prompt; see `replay_request`.
    """

    prompt: tuple[int, ...] = field(repr=False)
    _: KW_ONLY
    seed: int
    grammar: Grammar | None = None
    queue_deadline_s: float = math.inf
    adapter_id: int = BASE_MODEL
    prediction: PredictedText | None = None
    detokenize: bool = True
    is_counted: bool = True
    replay: Replay | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        prompt: tuple[int, ...],
        seed: int,
        grammar: Grammar | None = None,
        *,
        request_id: str,
        adapter_id: int = BASE_MODEL,
        prediction: PredictedText | None = None,
        queue_deadline_s: float = math.inf,
    ) -> EngineRequest:
        """Return `request` with its prompt as token ids; the constructor takes 5 us more."""
        made = object.__new__(cls)
        made.__dict__.update(
            vars(request),
            request_id=request_id,
            prompt=prompt,
            seed=seed,
            grammar=grammar,
            queue_deadline_s=queue_deadline_s,
            adapter_id=adapter_id,
            prediction=prediction,
        )
        return made

    def for_stream(self, request_id: str, *, is_counted: bool) -> EngineRequest:
        """Return the request under another id, faster than `replace`.

        Its reader makes the text, unless stop strings need it.
        """
        renamed = object.__new__(EngineRequest)
        detokenize = bool(self.params.stop)
        new = {"request_id": request_id, "detokenize": detokenize, "is_counted": is_counted}
        renamed.__dict__.update(vars(self), **new)
        return renamed

    def with_adapter(self, adapter_id: int) -> EngineRequest:
        """Return the request for the same adapter under another id."""
        return self if adapter_id == self.adapter_id else replace(self, adapter_id=adapter_id)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.prompt


@dataclass(frozen=True)
class Lookahead:
    """The target's most likely token after each guess of a sequence's last step.

    base_length: the sequence's length when the step ran. draft_token_ids, lookahead_token_ids: its
    guesses, in this order. next_token_ids: the target's most likely token after each of them.
    """

    base_length: int
    draft_token_ids: tuple[int, ...]
    lookahead_token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class HeadDraft:
    """A draft that the target's ranks made at the end of a step, with a head or by lookup.

    base_length, base_token: the text that it continues: its number of tokens, and the last of them.
    parents: the tree of its tokens, as in `specdec.types.drafts.draft_tree`; None for a chain.
    confidences: as in VerifiedRow. version: of the head. method: that drafted; None for the only
    one.
    """

    base_length: int
    base_token: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    confidences: tuple[int, ...] = ()
    version: int = CONFIGURED_VERSION
    method: str | None = None

    def probabilities(self, count: int) -> list[float]:
        """Return the confidences of the first `count` tokens, from 0 to 1."""
        return [each / 1000 for each in self.confidences[:count]]


@dataclass
class PromptReport:
    """Log-probabilities of a prompt's tokens, collected from its chunks and sent together.

    listed: what is listed at each position.
    """

    listed: ListedTokens
    parts: list[Logprobs] = field(default_factory=list)

    def add(self, part: PromptLogprobs) -> None:
        """Add the next part; a first one after a preemption replaces all parts."""
        if part.start == 1:
            self.parts.clear()
        self.parts.append(part.logprobs)

    @property
    def logprobs(self) -> Logprobs:
        """All of them."""
        num_best, given = self.listed
        return Logprobs.join(self.parts or [Logprobs.nothing(num_best, len(given))])


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request. KV exists for the first `num_computed_tokens` of `token_ids`.

    rules: of sampling. detokenizer: None for outputs without text. max_tokens: limit of generated
    tokens, None for the context length alone.
    leader: choice 0 of the same request, if this choice shares its prompt's KV.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache. has_run: whether it was
    in a batch before, as a preempted sequence was. may_draft: False once its logits were NaN beside
    drafts. draft_length: adapts to acceptance; None before the first draft. acceptance: of its
    drafts, for the division of a budget. confidence: of a head in its drafts, for the same.
    params: of the request. opted_out: whether these turn drafts off.
    lookahead: of the last step, if it had any. head_draft: of the last step. output_buffer: tokens
    not sent yet. constraint: its structured output.
    num_pending: most tokens that the step in flight will yield, while the next step is scheduled
    ahead of it; else 0. num_pending_drafts: those of them that are drafts and may be rejected.
    block_keys: of its prefix, as `BlockManager.attach` extends them.
    prediction: its place in the predicted output; None without one.
    rank: its order in queue, batch and preemption, see `arrive`.
    prompt_report: None where none is requested, or it was sent; until then the whole prompt must be
    computed.
    choices: of its request, once that is open. streams_tokens: whether the output of a plain decode
    is its token alone: there is one choice, without a text, and no stream interval.
    open_length: up to this number of tokens only an end-of-sequence token ends it.
    snapshot: that the states of its recurrent layers begin with, since it was last admitted.
    thinking_budget: None once it was reached, or without one that can be.
    """

    seq_id: int
    request: EngineRequest
    rules: SamplingRules
    detokenizer: IncrementalDetokenizer | None
    max_tokens: int | None = None
    leader: Sequence | None = None
    rank: tuple[float, int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_pending_drafts: int = 0
    num_cached_tokens: int = 0
    has_run: bool = False
    may_draft: bool = True
    draft_length: DraftLength | None = None
    acceptance: AcceptanceHistory = _NO_ACCEPTANCE
    confidence: ConfidenceHistory = _NO_CONFIDENCE
    lookahead: Lookahead | None = None
    head_draft: HeadDraft | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    open_length: int = 0
    snapshot: Snapshot | None = None
    streams_tokens: bool = False
    output_buffer: OutputBuffer = field(default_factory=lambda: OutputBuffer(interval=1))
    constraint: OutputConstraint | None = None
    prompt_report: PromptReport | None = field(init=False, default=None)
    block_keys: list[BlockKey] = field(init=False)
    prediction: PredictionCursor | None = field(init=False, default=None)
    choices: Choices = field(init=False)
    params: SamplingParams = field(init=False)
    opted_out: bool = field(init=False)
    thinking_budget: ThinkingBudget | None = field(init=False)

    def __post_init__(self) -> None:
        self.arrive(0.0)
        self.params, self.thinking_budget = self.request.params, self.request.thinking_budget
        options = self.params.speculation
        self.opted_out = options.enabled is False or options.num_speculative_tokens == 0
        self.block_keys = [root_key(self.request.cache_salt, self.request.adapter_id)]
        if self.rules.listed_prompt_tokens is not None:
            self.prompt_report = PromptReport(self.rules.listed_prompt_tokens)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.token_ids = [*self.request.prompt_token_ids, *self.request.resume_token_ids]
        if self.request.prediction is not None:
            self.prediction = PredictionCursor(self.request.prediction, self.num_prompt_tokens)

    def arrive(self, now_s: float) -> None:
        """Set the rank of a sequence that is added at a time; the lowest rank goes first.

        Waiting counts as much as priority does, so that no request is starved: as all requests
        age alike, their order never changes while they wait.
        """
        self.rank = now_s + AGEING_S * self.request.priority, self.seq_id

    @property
    def choice(self) -> int:
        """Index among the choices of the request."""
        return self.rules.choice

    @property
    def waits_for_leader(self) -> bool:
        """Return whether choice 0 has yet to compute the prompt that all choices share."""
        leader = self.leader
        if leader is None or leader.status is SequenceStatus.FINISHED:
            return False
        return leader.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens; while some are pending, the greatest that is possible."""
        return len(self.token_ids) + self.num_pending

    def take_prompt_logprobs(self) -> Logprobs | None:
        """Return the log-probabilities of its prompt, the first time; None where none are due."""
        report, self.prompt_report = self.prompt_report, None
        return None if report is None else report.logprobs

    def max_length(self, max_model_len: int) -> int:
        """Return the number of tokens at which it ends, or its thinking budget is reached."""
        most, start = max_model_len, self.num_prompt_tokens
        if self.max_tokens is not None:
            most = min(most, start + self.max_tokens)
        budget = self.thinking_budget
        return most if budget is None else min(most, start + budget.num_tokens)

    def reaches_budget(self, count: int, max_model_len: int) -> bool:
        """Return whether up to `count` more tokens may reach its thinking budget."""
        if self.thinking_budget is None:
            return False
        return self.num_tokens + count >= self.max_length(max_model_len)

    def drop_idle_budget(self, max_model_len: int) -> None:
        """Drop a thinking budget that is reached only where it ends: no step runs ahead of one."""
        budget, self.thinking_budget = self.thinking_budget, None
        most = self.max_length(max_model_len) - self.num_prompt_tokens
        if budget is not None and budget.num_tokens < most:
            self.thinking_budget = budget

    def longest_open(self, max_model_len: int) -> int:
        """Return the greatest length at which only an end-of-sequence token can end it."""
        if self.params.stop or self.params.stop_token_ids:
            return 0
        return self.max_length(max_model_len) - 1

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def admission(self) -> SequenceAdmission:
        """The message that introduces it to a target worker."""
        rules = self.rules
        if rules.prompt_logprobs is not None and self.prompt_report is None:
            rules = replace(rules, prompt_logprobs=None)
        return self._admission(rules, self.snapshot)

    @property
    def admission_with_tokens(self) -> SequenceAdmission:
        """The message that introduces it to a target worker with a head that reads the tokens."""
        return replace(self.admission, token_ids=tuple(self.token_ids))

    @property
    def draft_admission(self) -> SequenceAdmission:
        """The message that introduces it to a draft worker, with its grammar if quick to compile.

        Draft workers compute no log-probabilities.
        """
        rules = replace(self.rules, logprobs=None, prompt_logprobs=None, logprob_token_ids=())
        rules = replace(rules, replay=None)
        grammar, admission = self.request.grammar, self._admission(rules)
        if grammar is None or grammar.compile_s > MAX_DRAFT_COMPILE_S:
            return admission
        return replace(admission, grammar=grammar.spec, token_ids=tuple(self.token_ids))

    def _admission(
        self, rules: SamplingRules, snapshot: Snapshot | None = None
    ) -> SequenceAdmission:
        return SequenceAdmission(
            seq_id=self.seq_id,
            num_prompt_tokens=self.num_prompt_tokens,
            rules=rules,
            token_ids=tuple(self.token_ids) if rules.needs_tokens else (),
            snapshot=snapshot,
        )

    def predicted_draft(self, control: SpeculationControl) -> tuple[int, ...]:
        """Return the draft of its predicted output; empty without one, or where it is opted out.

        A number of draft tokens in the request is a limit. While tokens are pending there is none.
        """
        if self.prediction is None or self.num_pending or not self.is_eligible(control):
            return ()
        most = self.params.speculation.num_speculative_tokens
        if most is None or not control.allow_request_override:
            return self.prediction.draft(self.token_ids)
        return self.prediction.draft(self.token_ids, most)

    def is_eligible(self, control: SpeculationControl) -> bool:
        """Return whether it may have drafts, if the step has any."""
        return self.may_draft and not (control.allow_request_override and self.opted_out)

    def drafting_method(self, control: SpeculationControl) -> str | None:
        """Return the method that drafts for it; None for all that are loaded."""
        requested = self.params.speculation.method
        if requested is not None and control.allow_request_override:
            return requested
        return control.method

    @property
    def is_decoding(self) -> bool:
        """Return whether only the last token is uncomputed, be it the last one of a prompt."""
        return len(self.token_ids) + self.num_pending == self.num_computed_tokens + 1


@dataclass(eq=False, slots=True)
class Choices:
    """The sequences of one request.

    unfinished: sequences that have not ended, by choice. num_output_tokens, speculation: totals of
    all choices, ended ones included. prediction: the part of speculation from predicted output.
    """

    unfinished: list[Sequence]
    num_output_tokens: int = 0
    speculation: SpeculationStats = _NO_DRAFTS
    prediction: SpeculationStats = _NO_DRAFTS
