"""Validates requests and turns them into sequences."""

from __future__ import annotations

import collections.abc

import numpy as np
from numpy.typing import NDArray

from specdec.config.engine import MAX_STREAM_INTERVAL, EngineConfig
from specdec.engine.requests.replays import with_replay
from specdec.engine.requests.sampling_resolver import resolve
from specdec.engine.requests.stop_checker import check_token
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.output_buffer import OutputBuffer
from specdec.sequences.sequence import EngineRequest, Sequence
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.grammar.matcher import OutputConstraint
from specdec.text.tokenizer import Tokenizer, check_token_ids
from specdec.types.control import SpeculationControl
from specdec.types.errors import (
    ContextLengthError,
    DetokenizeError,
    GrammarError,
    InvalidValueError,
)
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.types.validation import require_range

MAX_PRIORITY = 2**63 - 1
"""Limit of both signs, above that of a service: seconds of arrival are added to it as floats."""

MAX_PROMPT_LOGPROBS = 200_000
"""Limit of log-probabilities of one prompt. One message carries them, 16 bytes each, and a gRPC
client accepts 4 MiB by default."""

MAX_ANSWER_LOGPROBS = 200_000
"""The same limit for an answer that is sent as one message."""


def check_request(request: EngineRequest, config: EngineConfig, model: ModelConfig) -> None:
    """Validate a request against configuration and model. Raises InvalidValueError."""
    _check_prompt(request, config.max_model_len, model.vocab_size)
    _check_prompt_logprobs(request)
    room = config.max_model_len - len(request.prompt_token_ids)
    max_tokens = request.params.max_tokens
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthError(config.max_model_len, len(request.prompt_token_ids), max_tokens)
    most = min(max_tokens or model.sampling_defaults.max_tokens or room, room)
    if max_tokens is None and request.params.min_tokens > most:
        why = "what the context leaves" if most == room else "the default of max_tokens"
        raise InvalidValueError("min_tokens", request.params.min_tokens, f"at most {most}, {why}")
    _check_resumed(request, most, model.vocab_size)
    _check_thinking_budget(request, model.vocab_size)
    if type(request.priority) is not int:  # the queue is sorted by it
        raise InvalidValueError("priority", request.priority, "a whole number")
    require_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    require_range("stream_interval", request.stream_interval, 1, MAX_STREAM_INTERVAL)
    if request.params.stop and not request.detokenize:
        raise InvalidValueError("detokenize", False, "true where stop strings are given")
    method = request.params.speculation.method
    loaded = config.speculation.methods if config.speculation else ()
    if method is not None and method not in loaded:
        reason = f"what is loaded: {' or '.join(loaded) or 'none'}"
        raise InvalidValueError("speculation.method", method, reason)


def check_answer_in_one_message(params: SamplingParams, max_tokens: int) -> None:
    """Raise InvalidValueError for more log-probabilities than one message can carry.

    max_tokens: of each choice. A stream needs no limit, as it has a message for each step.
    """
    num_tokens = params.n * max_tokens
    if params.num_listed * num_tokens > MAX_ANSWER_LOGPROBS:
        limit = f"low enough that {num_tokens} tokens (n times max_tokens) have at most "
        limit += f"{MAX_ANSWER_LOGPROBS} in all, each token's own included, or be streamed"
        raise InvalidValueError("logprobs", params.logprobs, limit)


def _check_prompt(request: EngineRequest, max_model_len: int, vocab_size: int) -> None:
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidValueError("prompt", "", "at least 1 token long")
    if num_tokens >= max_model_len:
        raise ContextLengthError(max_model_len, num_tokens)
    check_token_ids("prompt", request.prompt_token_ids, vocab_size)


def _check_prompt_logprobs(request: EngineRequest) -> None:
    num_best, num_tokens = request.params.prompt_logprobs, len(request.prompt_token_ids)
    if num_best is None:
        return
    num_listed = 1 + num_best + len(request.params.logprob_token_ids)
    if num_listed * num_tokens > MAX_PROMPT_LOGPROBS:
        limit = f"low enough that {num_tokens} tokens have at most {MAX_PROMPT_LOGPROBS} in all"
        raise InvalidValueError("prompt_logprobs", num_best, f"{limit}, each token's own included")


def _check_resumed(request: EngineRequest, max_tokens: int, vocab_size: int) -> None:
    resumed = request.resume_token_ids
    check_token_ids("resume_token_ids", resumed, vocab_size)
    if resumed and request.params.n > 1:
        raise InvalidValueError("n", request.params.n, "1 where resume_token_ids are given")
    if len(resumed) >= max_tokens:
        limit = f"fewer than the {max_tokens} that the request may generate"
        raise InvalidValueError("resume_token_ids", f"{len(resumed)} tokens", limit)


def _check_thinking_budget(request: EngineRequest, vocab_size: int) -> None:
    budget, params = request.thinking_budget, request.params
    if budget is None:
        return
    is_whole = not request.resume_token_ids
    is_plain = params.n == 1 and params.logprobs is None and is_whole and not request.receipt
    assert is_plain, "tokens of a mark are not sampled"
    check_token_ids("thinking_token_budget", budget.closing_ids, vocab_size)


def has_allowed_token(
    rules: SamplingRules,
    token_ids: collections.abc.Sequence[int],
    num_output_tokens: int,
    vocab_size: int,
    grammar_mask: NDArray[np.int32] | None,
) -> bool:
    """Return whether any token may follow `token_ids`, the last `num_output_tokens` being output.

    grammar_mask: int32 [ceil(vocab_size / 32)], as in StepRow; None allows all.
    """
    allowed = np.full(vocab_size, rules.allowed_token_ids is None)
    allowed[list(rules.allowed_token_ids or ())] = True
    if grammar_mask is not None:
        bits = np.unpackbits(grammar_mask.view(np.uint8), bitorder="little")
        allowed &= bits[:vocab_size].astype(bool)
    output = tuple(token_ids[len(token_ids) - num_output_tokens :])
    for word in rules.bad_words:
        before = word[:-1]  # in the output alone, as for `LogitsProcessor`
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            allowed[word[-1]] = False
    # A grammar's mask includes min_tokens: it allows an end token if nothing else is allowed.
    if grammar_mask is None and num_output_tokens < rules.min_tokens:
        allowed[list(rules.end_token_ids)] = False
    return bool(allowed.any())


class InputProcessor:
    """Makes the sequences of requests for one engine. Stateless."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer

    def check(self, request: EngineRequest, control: SpeculationControl) -> None:
        """Raise InvalidValueError where `sequences` would, up to the grammar. Thread-safe.

        It makes no matcher: those share the lexer of the grammar and are counted on the engine's
        thread. So `sequences` alone rejects resume_token_ids that the grammar forbids.
        """
        self._leader(request, 0, control)

    def sequences(
        self, request: EngineRequest, first_seq_id: int, control: SpeculationControl
    ) -> list[Sequence]:
        """Return a sequence for each choice, numbered from `first_seq_id`; on the engine's thread.

        control: its allowed_verifiers are those that the request may choose. With a prefix cache
        the first choice computes the prompt for all. Raises InvalidValueError.
        """
        leader = self._leader(request, first_seq_id, control)
        shared = leader if self._config.enable_prefix_caching else None
        others = (
            self._sequence(request, first_seq_id + choice, leader.rules.of_choice(choice), shared)
            for choice in range(1, request.params.n)
        )
        sequences = [leader, *others]
        for seq in sequences:
            seq.constraint = _constraint(seq)
        return sequences

    def _leader(self, request: EngineRequest, seq_id: int, control: SpeculationControl) -> Sequence:
        """Return choice 0 of a valid request, without its constraint."""
        check_request(request, self._config, self._model)
        service = self._config.speculation
        rules = resolve(
            request.params,
            request.seed,
            self._model,
            self._tokenizer,
            service,
            request.prompt_token_ids,
            None if service is None else control.allowed_verifiers,
            allow_override=control.allow_request_override,
        )
        if request.replay is not None:
            return self._sequence(request, seq_id, with_replay(rules, request), None)
        leader = self._sequence(request, seq_id, rules, None)
        self._replay_text(leader)
        return leader

    def _sequence(
        self, request: EngineRequest, seq_id: int, rules: SamplingRules, leader: Sequence | None
    ) -> Sequence:
        params = request.params
        detokenizer = None
        if request.detokenize:
            prompt = request.prompt_token_ids
            detokenizer = IncrementalDetokenizer.of(self._tokenizer, params, prompt)
        max_tokens = params.max_tokens or self._model.sampling_defaults.max_tokens
        interval = request.stream_interval
        buffer = OutputBuffer(self._config.stream_interval if interval is None else interval)
        seq = Sequence(
            seq_id, request, rules, detokenizer, max_tokens, leader, output_buffer=buffer
        )
        seq.drop_idle_budget(self._config.max_model_len)
        seq.open_length = seq.longest_open(self._config.max_model_len)
        return seq

    def _replay_text(self, seq: Sequence) -> None:
        """Advance the text past the output tokens that the caller already has."""
        resumed = seq.request.resume_token_ids
        for index, token in enumerate(resumed):
            try:
                stop = check_token(seq, token, self._model.eos_token_ids)
            except DetokenizeError as error:
                raise DetokenizeError(index) from error
            if stop is not None:
                limit = f"unfinished; number {index} ends the text"
                raise InvalidValueError("resume_token_ids", f"... {token}", limit)
        if not resumed or seq.detokenizer is None:
            return
        if seq.params.stop:
            seq.detokenizer.take()
        else:
            seq.detokenizer.decode(resumed)


def _constraint(seq: Sequence) -> OutputConstraint | None:
    """Make the constraint of a sequence, advanced past the output that the caller has."""
    grammar, params = seq.request.grammar, seq.params
    assert (grammar is None) == (params.structured_output is None), "grammar not compiled"
    if grammar is None or seq.rules.replay is not None:
        return None
    constraint = OutputConstraint(
        grammar.of_choice(seq.choice),
        seq.num_prompt_tokens,
        params.min_tokens,
        seq.rules.end_token_ids,
    )
    try:
        constraint.follow(seq.token_ids)
    except GrammarError as error:
        limit = f"output that structured_output allows: {error}"
        raise InvalidValueError("resume_token_ids", seq.request.resume_token_ids, limit) from error
    return constraint
