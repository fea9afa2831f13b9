"""Issuing of receipts for answers that are complete."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.sequences.sequence import EngineRequest
from specdec.types.errors import InvalidValueError
from specdec.types.messages import BASE_MODEL
from specdec.types.reports.receipts import (
    SALT_BYTES,
    Opening,
    Receipt,
    ReceiptChoice,
    ReceiptModel,
    Statement,
    output_digest,
    parameters_of,
    prompt_digest,
)
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import LOSSY_VERIFIERS, SamplingDefaults, SamplingParams

if TYPE_CHECKING:  # cryptography is imported where there is a key
    from specdec.engine.receipts.signatures import SigningKey


@dataclass
class Answer:
    """The tokens of an answer so far. outputs: by choice, after the resumed tokens."""

    request: EngineRequest
    outputs: dict[int, array[int]] = field(default_factory=dict)
    ends: dict[int, EngineOutput] = field(default_factory=dict)

    def add(self, output: EngineOutput) -> None:
        """Add an output of the engine; those of a choice come in order."""
        tokens = self.outputs.get(output.choice)
        if tokens is None:
            tokens = self.outputs[output.choice] = array("i", self.request.resume_token_ids)
        tokens.extend(output.token_ids)
        if output.finish_reason is not None:
            self.ends[output.choice] = output

    @property
    def sampled_parts(self) -> tuple[Answer, ...]:
        """The answer, or its parts before and after the mark that a thinking budget has added.

        The latter resumes the former and the mark.
        """
        request, budget = self.request, self.request.thinking_budget
        end = 0 if budget is None else budget.end_of_mark(self.outputs[0])
        if budget is None or not end:
            return (self,)
        tokens = self.outputs[0]
        before = Answer(request, {0: tokens[: budget.num_tokens]})
        resumed = replace(request, resume_token_ids=tuple(tokens[:end]), thinking_budget=None)
        return (before, Answer(resumed, {0: tokens})) if end < len(tokens) else (before,)


def require_seeded(params: SamplingParams, temperature: float, verifier: str) -> None:
    """Raise InvalidValueError for a request whose tokens do not follow from its seed."""
    if verifier != "coupled" and (temperature > 0 or verifier in LOSSY_VERIFIERS):
        limit = f"false with verifier {verifier}, whose tokens depend on the drafts"
        raise InvalidValueError("receipt", True, limit)


def require_base_model(adapter_id: int) -> None:
    """Raise InvalidValueError for a request of an adapter, which a receipt cannot name."""
    if adapter_id != BASE_MODEL:
        raise InvalidValueError("receipt", True, "false for a LoRA adapter")


def statement_of(
    answer: Answer,
    model: ReceiptModel,
    defaults: SamplingDefaults,
    salt: bytes,
    issued_at: int,
) -> Statement:
    """Return the statement of a complete answer. salt: of the digests."""
    request, ends = answer.request, sorted(answer.ends.items())
    assert len(ends) == request.params.n, "the answer is not complete"
    choices = (_choice(salt, index, answer.outputs[index], end) for index, end in ends)
    return Statement(
        model=model,
        seed=request.seed,
        verifier=ends[0][1].verifier,
        parameters=parameters_of(request.params, request.params.resolved(defaults)),
        num_prompt_tokens=len(request.prompt_token_ids),
        prompt_digest=prompt_digest(salt, request.prompt_token_ids),
        choices=tuple(choices),
        num_resumed_tokens=len(request.resume_token_ids),
        request_id=request.request_id,
        issued_at=issued_at,
    )


def issue(
    answer: Answer,
    key: SigningKey,
    model: ReceiptModel,
    defaults: SamplingDefaults,
    issued_at: int,
) -> Receipt:
    """Return the receipt of a complete answer, with its tokens."""
    salt = secrets.token_bytes(SALT_BYTES)
    statement = statement_of(answer, model, defaults, salt, issued_at).to_text()
    outputs = (tuple(tokens) for _, tokens in sorted(answer.outputs.items()))
    opening = Opening(salt.hex(), tuple(answer.request.prompt_token_ids), tuple(outputs))
    return Receipt(statement, key.sign(statement), key.public_key, opening)


def _choice(salt: bytes, index: int, tokens: array[int], end: EngineOutput) -> ReceiptChoice:
    assert end.finish_reason is not None, "an end without a reason"
    digest = output_digest(salt, index, tokens)
    return ReceiptChoice(index, len(tokens), digest, end.finish_reason.value, end.stop_reason)
