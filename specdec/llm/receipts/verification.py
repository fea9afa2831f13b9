"""Verification of a receipt: signature, digests, model, ends of texts, and every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.engine.receipts.issuing import require_seeded
from specdec.engine.receipts.report import (
    ChoiceReport,
    ImpossibleToken,
    Outcome,
    ReceiptReport,
    default_tolerance,
)
from specdec.engine.requests.stop_checker import append
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.sequences.sequence import Sequence as TextSequence
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.grammar.matcher import Grammar
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import GrammarError, InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.reports.receipts import (
    NOISE_VERSION,
    Opening,
    Receipt,
    ReceiptChoice,
    ReceiptModel,
    Statement,
    output_digest,
    params_from,
    prompt_digest,
)
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import Replay, SamplingRules

_IDENTITY = (
    *("fingerprint", "dtype", "quantization", "kv_cache_dtype", "hf_overrides", "end_token_ids"),
)


class Replayer(Protocol):
    """An implementation of a model, with its tokenizer."""

    model: ModelConfig
    tokenizer: Tokenizer
    receipt_model: ReceiptModel

    def grammar(self, spec: StructuredOutput, num_sequences: int) -> Grammar:
        """Compile a grammar for the choices of an answer. Raises InvalidValueError."""

    def replay(self, request: EngineRequest, replay: Replay) -> Logprobs:
        """Return the comparison of an output; see `OutputReplay.compare`.

        Raises InvalidValueError.
        """


def verify_receipt(
    receipt: Receipt,
    replayer: Replayer,
    *,
    tolerance: float | None = None,
    public_key: str | None = None,
) -> ReceiptReport:
    """Verify a receipt by one pass over prompt and output for each choice.

    tolerance: of the difference of two logits; None for `default_tolerance`. public_key: the key
    that must have signed it, hexadecimal; None accepts any. Raises InvalidValueError for a receipt
    that cannot be read.
    """
    statement = Statement.from_text(receipt.statement)
    if reason := forgery(receipt, statement, public_key):
        return ReceiptReport(Outcome.FORGED, reason)
    if reason := _obstacle(receipt, statement, replayer.receipt_model):
        return ReceiptReport(Outcome.UNVERIFIABLE, reason)
    assert receipt.opening is not None, "its absence is an obstacle"
    if tolerance is None:
        model = statement.model
        tolerance = default_tolerance(model.dtype, model.quantization, model.kv_cache_dtype)
    try:
        answer = _ClaimedAnswer.of(statement, receipt.opening, replayer)
        choices = tuple(
            answer.verify_choice(choice, output, tolerance)
            for choice, output in zip(statement.choices, receipt.opening.outputs, strict=True)
        )
    except (InvalidValueError, GrammarError) as error:
        return ReceiptReport(Outcome.UNVERIFIABLE, str(error))
    return ReceiptReport.of(choices, tolerance)


def forgery(receipt: Receipt, statement: Statement, public_key: str | None) -> str:
    """Return why signature or digests show that a receipt was changed; empty if they match."""
    from specdec.engine.receipts.signatures import is_signed  # imports cryptography

    if public_key is not None and receipt.public_key != public_key.lower():
        return "the receipt is signed by another key"
    if not is_signed(receipt):
        return "the signature does not match the statement"
    opening = receipt.opening
    if opening is None:
        return ""
    salt = opening.salt_bytes
    if prompt_digest(salt, opening.prompt_token_ids) != statement.prompt_digest:
        return "the prompt does not match its digest"
    numbers = [len(output) for output in opening.outputs]
    if numbers != [choice.num_tokens for choice in statement.choices]:
        return "the outputs do not have the numbers of tokens of the choices"
    if len(opening.prompt_token_ids) != statement.num_prompt_tokens:
        return f"the prompt does not have {statement.num_prompt_tokens} tokens"
    for choice, output in zip(statement.choices, opening.outputs, strict=True):
        if output_digest(salt, choice.index, output) != choice.digest:
            return f"the tokens of choice {choice.index} do not match their digest"
    return ""


def _obstacle(receipt: Receipt, statement: Statement, present: ReceiptModel) -> str:
    """Return why this model cannot replay a receipt; empty if it can."""
    if receipt.opening is None:
        return "the receipt has no tokens (opening)"
    if statement.noise != NOISE_VERSION:
        return f"noise version {statement.noise} is not {NOISE_VERSION}"
    for name in _IDENTITY:
        claimed, own = getattr(statement.model, name), getattr(present, name)
        if claimed != own:
            return f"model.{name} is {claimed!r} in the receipt, and {own!r} here"
    num_tokens = statement.num_prompt_tokens + max(map(len, receipt.opening.outputs))
    if num_tokens > present.max_model_len:
        return f"the answer has {num_tokens} tokens (max_model_len here: {present.max_model_len})"
    try:
        params = params_from(statement.parameters)
        assert params.temperature is not None, "params_from requires it"
        require_seeded(params, params.temperature, statement.verifier)
    except InvalidValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _ClaimedAnswer:
    """An answer as its receipt states it, and the model that is to have given it."""

    statement: Statement
    request: EngineRequest
    replayer: Replayer

    @classmethod
    def of(cls, statement: Statement, opening: Opening, replayer: Replayer) -> _ClaimedAnswer:
        params = params_from(statement.parameters)
        spec = params.structured_output
        request = EngineRequest(
            prompt=opening.prompt_token_ids,
            params=params,
            request_id=statement.request_id,
            seed=statement.seed,
            grammar=None if spec is None else replayer.grammar(spec, params.n),
        )
        return cls(statement, request, replayer)

    def verify_choice(
        self, choice: ReceiptChoice, output: Sequence[int], tolerance: float
    ) -> ChoiceReport:
        """Return the report on a choice."""
        wrong_end = self._unknown_token(output) or self._wrong_end(choice, output)
        end = len(output) if wrong_end is None else wrong_end.position
        num_resumed = self.statement.num_resumed_tokens
        report = ChoiceReport(choice.index, len(output), num_resumed, impossible=wrong_end)
        if end <= num_resumed:
            return report
        replay = Replay(tuple(output[:end]), choice.index, tolerance)
        return report.with_tokens(self.replayer.replay(self.request, replay), tolerance)

    def _unknown_token(self, output: Sequence[int]) -> ImpossibleToken | None:
        """Return the first token that is not in the vocabulary."""
        size = self.replayer.model.vocab_size
        unknown = ((i, token_id) for i, token_id in enumerate(output) if not 0 <= token_id < size)
        position, token_id = next(unknown, (None, 0))
        if position is None:
            return None
        return ImpossibleToken(position, token_id, None, None, "it is no token of the model")

    def _wrong_end(self, choice: ReceiptChoice, output: Sequence[int]) -> ImpossibleToken | None:
        """Return the first place where the text ends and the output does not, or the other way."""
        seq, last = self._text(), len(output) - 1
        ends, max_model_len = self.replayer.model.eos_token_ids, self.statement.model.max_model_len
        stops = (append(seq, token_id, ends, max_model_len) for token_id in output)
        end, stop = next(((i, each) for i, each in enumerate(stops) if each), (last, None))
        if end < last:
            return ImpossibleToken(end + 1, output[end + 1], None, None, "the text ends before it")
        if stop is None:
            return ImpossibleToken(last, output[last], None, None, "the text does not end here")
        found = stop.finish_reason.value, stop.stop_reason
        if found != (choice.finish_reason, choice.stop_reason):
            by = stop.finish_reason.value if stop.stop_reason is None else repr(stop.stop_reason)
            reason = f"the text ends here by {by}"
            return ImpossibleToken(last, output[last], None, None, reason)
        return None

    def _text(self) -> TextSequence:
        params, prompt = self.request.params, self.request.prompt_token_ids
        detokenizer = None
        if params.stop:
            detokenizer = IncrementalDetokenizer.of(self.replayer.tokenizer, params, prompt)
        return TextSequence(0, self.request, SamplingRules(), detokenizer, params.max_tokens)
