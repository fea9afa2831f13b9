"""A request's tokens on their way through the engine."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Any

from specdec.sequences.output_buffer import UntoldTokens
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.grammar import Grammar, OutputConstraint
from specdec.types.adaptive_length import DraftLength
from specdec.types.messages import Logprobs, PromptLogprobs, SequenceAdmission
from specdec.types.request import GenerateRequest
from specdec.types.sampling_params import SamplingParams
from specdec.types.sampling_spec import SamplingRules
from specdec.types.stats import SpeculationStats

MAX_DRAFT_COMPILE_S = 0.05
"""A grammar that took longer to compile is not given to draft workers, which would be held up."""


class SequenceStatus(Enum):
    """Where a sequence stands; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class EngineRequest(GenerateRequest):
    """A request after preprocessing. `seed` fixes all its random choices.

    prompt: the token ids. grammar: the compiled `params.structured_output`. queue_deadline_s: when
    a request that still waits is dropped, by the clock of `Engine.expire`.
    """

    prompt: tuple[int, ...]
    _: KW_ONLY
    seed: int
    grammar: Grammar | None = None
    queue_deadline_s: float = math.inf

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        prompt: tuple[int, ...],
        seed: int,
        grammar: Grammar | None = None,
        **more: Any,
    ) -> EngineRequest:
        """Return `request` with its prompt as token ids and `more` fields set."""
        fields = {**vars(request), "prompt": prompt, "seed": seed, "grammar": grammar, **more}
        return cls(**fields)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.prompt


@dataclass(frozen=True)
class Lookahead:
    """What a sequence's last step showed beyond the verified tokens.

    base_length: the sequence's length when it ran. draft_token_ids, lookahead_token_ids: the
    guesses that it ran, in this order. next_token_ids: the target's likeliest token after each.
    """

    base_length: int
    draft_token_ids: tuple[int, ...]
    lookahead_token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]


@dataclass
class PromptReport:
    """Log-probabilities of a prompt's tokens, computed in parts and returned together, once.

    num_best: as in SamplingRules; None if they were not requested, or have been returned.
    """

    num_best: int | None
    parts: list[Logprobs] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether they have still to be returned, so that the whole prompt must be run."""
        return self.num_best is not None

    def add(self, part: PromptLogprobs) -> None:
        """Takes in the next part; a first one after a preemption replaces what there was."""
        if part.start == 1:
            self.parts.clear()
        self.parts.append(part.logprobs)

    def take(self) -> Logprobs | None:
        """All of them; None where they are not due."""
        if self.num_best is None:
            return None
        whole = Logprobs.join(self.parts or [Logprobs.nothing(self.num_best)])
        self.num_best = None
        self.parts.clear()
        return whole


@dataclass(eq=False)
class Sequence:
    """One choice of a request. KV exists for the first `num_computed_tokens` of `token_ids`.

    rules: how its tokens are drawn. max_tokens: most tokens to generate, None for no limit of its
    own. leader: choice 0 of the same request, where this one shall share its prompt's KV.
    num_cached_tokens: those of its prompt whose KV was found in the prefix cache. has_run: whether
    it has been in a batch, as a preempted one has. constraint: what its structured output allows.
    may_draft: False once the target could make nothing of its logits beside drafts. draft_length:
    where it follows acceptance, None before the first draft. lookahead: of the last step, if it had
    any. untold: tokens that are buffered to be sent with those that follow.
    """

    seq_id: int
    request: EngineRequest
    rules: SamplingRules
    detokenizer: IncrementalDetokenizer
    max_tokens: int | None = None
    leader: Sequence | None = None
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    has_run: bool = False
    may_draft: bool = True
    draft_length: DraftLength | None = None
    lookahead: Lookahead | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    untold: UntoldTokens = field(default_factory=lambda: UntoldTokens(interval=1))
    constraint: OutputConstraint | None = field(init=False, default=None)

    prompt_report: PromptReport = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_report = PromptReport(self.rules.prompt_logprobs)
        self.token_ids = [*self.request.prompt_token_ids, *self.request.resume_token_ids]
        grammar = self.request.grammar
        assert (grammar is None) == (self.params.structured_output is None), "grammar not compiled"
        if grammar is not None:
            self.constraint = OutputConstraint(
                grammar,
                self.num_prompt_tokens,
                self.params.min_tokens,
                self.rules.end_token_ids,
            )

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def choice(self) -> int:
        """Index among the choices of its request."""
        return self.rules.choice

    @property
    def is_held_back(self) -> bool:
        """Whether to wait for the prompt that choice 0 computes: all choices begin with it."""
        leader = self.leader
        if leader is None or leader.status is SequenceStatus.FINISHED:
            return False
        return leader.num_output_tokens == 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, in queue, batch and need of blocks: the lower one."""
        return self.request.priority, self.seq_id

    @property
    def admission(self) -> SequenceAdmission:
        """What a worker has to know of it."""
        is_due = self.prompt_report.is_due
        return self._admission(self.rules if is_due else replace(self.rules, prompt_logprobs=None))

    @property
    def draft_admission(self) -> SequenceAdmission:
        """What a draft worker has to know of it: its grammar too, if that is compiled quickly.

        Log-probabilities are the target's affair.
        """
        rules = replace(self.rules, logprobs=None, prompt_logprobs=None)
        grammar, admission = self.request.grammar, self._admission(rules)
        if grammar is None or grammar.compile_s > MAX_DRAFT_COMPILE_S:
            return admission
        return replace(admission, grammar=grammar.spec, token_ids=tuple(self.token_ids))

    def _admission(self, rules: SamplingRules) -> SequenceAdmission:
        return SequenceAdmission(
            seq_id=self.seq_id,
            num_prompt_tokens=self.num_prompt_tokens,
            rules=rules,
            token_ids=tuple(self.token_ids) if rules.needs_tokens else (),
        )

    @property
    def declines_drafts(self) -> bool:
        """Whether its request asks that nothing be drafted for it."""
        options = self.params.speculation
        return options.enabled is False or options.num_speculative_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """Only the last token is uncomputed. So is that of a prompt with one token left to go."""
        return self.num_uncomputed_tokens == 1


@dataclass(eq=False)
class Choices:
    """The sequences of one request.

    unfinished: those that have not ended, by choice. num_output_tokens, speculation: of all choices
    together, those that have ended included.
    """

    unfinished: list[Sequence]
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
