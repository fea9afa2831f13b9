"""Makes sequences of a request, once it is found to be one that can be answered."""

from __future__ import annotations

from dataclasses import replace

from specdec.config import EngineConfig
from specdec.detokenizer import IncrementalDetokenizer
from specdec.ending import stop_at
from specdec.errors import GrammarError, InvalidValueError
from specdec.model_config import ModelConfig
from specdec.request_limits import check_request
from specdec.sampling_params import VerifierName
from specdec.sampling_rules import SamplingRules, resolve
from specdec.sequence import Request, Sequence
from specdec.tokenizer import Tokenizer
from specdec.untold import UntoldTokens


class RequestIntake:
    """Takes requests for one engine, and keeps nothing of them."""

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._speculation = config.speculation

    def allow_verifiers(self, names: tuple[VerifierName, ...]) -> None:
        """Refuses requests that name another one, from now on.

        Raises InvalidValueError where the service's own is not among them.
        """
        if self._speculation is not None:
            self._speculation = replace(self._speculation, allowed_verifiers=names)

    def sequences(self, request: Request, first_seq_id: int) -> list[Sequence]:
        """One for each choice, numbered from `first_seq_id` on. Raises InvalidValueError.

        With a prefix cache the first choice computes the prompt for all.
        """
        check_request(request, self._config, self._model.vocab_size)
        rules = self._rules(request)
        leader = self._sequence(request, first_seq_id, rules, None)
        self._replay(leader)
        shared = leader if self._config.enable_prefix_caching else None
        others = (
            self._sequence(request, first_seq_id + choice, rules.of_choice(choice), shared)
            for choice in range(1, request.params.n)
        )
        return [leader, *others]

    def _rules(self, request: Request) -> SamplingRules:
        return resolve(
            request.params,
            request.seed,
            self._model,
            self._tokenizer,
            self._speculation,
            request.prompt_token_ids,
        )

    def _sequence(
        self, request: Request, seq_id: int, rules: SamplingRules, leader: Sequence | None
    ) -> Sequence:
        params = request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            params.stop,
            params.skip_special_tokens,
            includes_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        max_tokens = params.settled(self._model.sampling_defaults).max_tokens
        interval = request.stream_interval
        untold = UntoldTokens(self._config.stream_interval if interval is None else interval)
        return Sequence(seq_id, request, rules, detokenizer, max_tokens, leader, untold=untold)

    def _replay(self, seq: Sequence) -> None:
        """Brings text and grammar to where they were after the tokens that the caller has."""
        resumed = seq.request.resume_token_ids
        for index, token in enumerate(resumed):
            if stop_at(seq, token, self._model.eos_token_ids) is not None:
                limit = f"unfinished; number {index} ends the text"
                raise InvalidValueError("resume_token_ids", f"... {token}", limit)
        if seq.constraint is not None:
            try:
                seq.constraint.follow(seq.token_ids)
            except GrammarError as error:
                limit = f"output that structured_output allows: {error}"
                raise InvalidValueError("resume_token_ids", resumed, limit) from error
        if resumed:
            seq.detokenizer.take()
