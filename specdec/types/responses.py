"""Results of calls, and the output of the engine that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from specdec.types.errors import SpecdecError
from specdec.types.reports.receipts import Receipt
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage
from specdec.types.sampling.sampling_params import SamplingDefaults, VerifierName
from specdec.types.token_display import ShownChoice, ShownOutput, outputs_html

if TYPE_CHECKING:  # numpy comes with them, and the client does without it
    from specdec.types.messages import Logprobs

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""A text, token ids that are used as they are, or the turns of a conversation."""


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length


class EngineOutput(NamedTuple):
    """Output that one step, or several (`stream_interval`), added to one choice of a request.

    request_id: the one by which the engine knows the request.
    text: whole characters only; may be empty while a character or a stop string is incomplete.
    is_drafted: for each of token_ids, whether it was drafted and accepted.
    text_lengths: for each of token_ids, the number of characters of `text` that are final with it;
        their sum is the length of `text`. Empty if the text was not made from these tokens.
    finish_reason: None while the choice continues. stop_reason: the stop string or stop token that
        ended it; None for an end-of-sequence token and for a limit of length.
    num_cached_tokens: those of the prompt whose KV this choice found in the prefix cache.
    num_output_tokens, speculation: of all choices of the request so far. prediction: the part of
        speculation whose drafts are from `SpeculationOptions.prediction`.
    num_steps: number of steps that produced token_ids.
    is_last: whether all choices have ended.
    verifier: decides which draft tokens are accepted.
    logprobs: of token_ids, if requested. prompt_logprobs: of the prompt's tokens from the second
        on, complete and only with the first output of the request.
    error: why the request failed; the other fields have no meaning then. receipt: of the whole
        answer, in the last output if requested.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats
    num_steps: int = 1
    num_cached_tokens: int = 0
    choice: int = 0
    is_drafted: tuple[bool, ...] = ()
    text_lengths: tuple[int, ...] = ()
    is_last: bool = False
    stop_reason: str | int | None = None
    verifier: VerifierName = "coupled"
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: SpecdecError | None = None
    prediction: SpeculationStats = SpeculationStats()
    receipt: Receipt | None = None

    def with_text(self, text: str, lengths: tuple[int, ...]) -> EngineOutput:
        """Return the output with its text and `text_lengths`, in half of `_replace`'s time."""
        fields = (*self[:2], text, *self[3:11], lengths, *self[12:])
        return tuple.__new__(EngineOutput, fields)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request over all choices, and its speculation statistics.

    accepted_prediction_tokens, rejected_prediction_tokens: draft tokens from the request's
    prediction that became output, and those that did not. verifier: decided which draft tokens were
    accepted. is_lossless: whether the distribution of the output is the same as without
    speculation.
    """

    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats
    verifier: VerifierName = "coupled"
    is_lossless: bool = True
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """A candidate token of one position.

    token: its spelling in the vocabulary. logprob: the natural logarithm of its probability, before
    any sampling parameter.
    """

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities of one position.

    chosen: the token of the output or prompt. rank: how many tokens are at least as likely; 1 is
    the most likely. best: the most likely tokens, the best first, as many as requested. given:
    those of the request's logprob_token_ids, in their order.
    """

    chosen: TokenLogprob
    rank: int
    best: tuple[TokenLogprob, ...]
    given: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class StreamChunk:
    """Output that one decoding step added to one choice.

    text: whole characters; may trail token_ids until the last chunk of the choice.
    finish_reason: in the last chunk of each choice. stop_reason: there too, the stop string or stop
        token that ended it; None for an end-of-sequence token and for a limit of length.
    seed: in the first and the last chunk of all. usage: in the last of all only.
    choice: index of the choice, from 0.
    is_drafted: for each of token_ids, whether it was drafted and accepted.
    text_lengths: for each of token_ids, the number of characters of `text` that are final with it.
    logprobs: of token_ids, if requested. prompt_logprobs: of the prompt's tokens from the second
        on, if requested, in the first chunk. receipt: in the last of all, if requested.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    seed: int | None
    usage: Usage | None
    choice: int = 0
    is_drafted: tuple[bool, ...] = ()
    text_lengths: tuple[int, ...] = ()
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True)
class Choice:
    """One completion of the prompt; for its fields see StreamChunk."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    is_drafted: tuple[bool, ...] = ()
    text_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. The same prompt, parameters and seed give the same one again.

    text, token_ids, finish_reason, stop_reason, logprobs: of the first choice. receipt: of all
    choices, if requested.
    """

    request_id: str
    choices: tuple[Choice, ...]
    seed: int
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    receipt: Receipt | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        return self.choices[0].logprobs

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the texts, with their drafted tokens marked."""
        choices = [
            ShownChoice(each.text, each.is_drafted, each.text_lengths, each.finish_reason.value)
            for each in self.choices
        ]
        return outputs_html([ShownOutput(None, choices, self.usage.speculation)])


@dataclass(frozen=True)
class TokenizedInput:
    """An input's token ids and, one for one, their spelling in the vocabulary.

    max_model_len: most tokens that a prompt and its completion may have together.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True)
class ModelInfo:
    """The model that is loaded, or an adapter of it.

    max_model_len: most tokens of a prompt and its completion together.
    speculation_method: None where nothing drafts, and then num_speculative_tokens is 0.
    sampling_defaults: used for parameters that a request leaves out.
    speculation_methods: those that a request may name, in the order in which they draft.
    parent: of an adapter, the name of the model; else empty.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    tensor_parallel_size: int
    speculation_method: str | None
    num_speculative_tokens: int
    version: str
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    speculation_methods: tuple[str, ...] = ()
    parent: str = ""
