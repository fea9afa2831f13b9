"""Receipts: signed statements of what determines the tokens of an answer, and of the tokens."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn, TypeVar

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import (
    MAX_CHOICES,
    SEED_LIMIT,
    VERIFIERS,
    SamplingDefaults,
    SamplingParams,
    StructuredOutput,
)
from specdec.types.validation import check_types, require_choice, require_range, unique_keys

T = TypeVar("T")

RECEIPT_VERSION = 1
NOISE_VERSION = 1
"""Version of the noise by chunks of 64 tokens (`specdec.sampling.gumbel`)."""

MAX_RECEIPT_BYTES = 2**26
MAX_TOKENS = 2**24
SALT_BYTES = 16
_TOKEN_LIMIT = 2**31
_DEFAULT = SamplingParams()

_PROMPT_DOMAIN = b"specdec receipt prompt 1\0"
_OUTPUT_DOMAIN = b"specdec receipt output 1\0"
SIGNATURE_DOMAIN = b"specdec receipt statement 1\0"
"""Prefix of the signed bytes, so that no other signature of the key passes for a receipt's."""


@dataclass(frozen=True)
class ReceiptModel:
    """Properties of a model that determine its logits, and the tokens that end its texts.

    fingerprint: of weights, configuration and tokenizer. Other fields: as in LLMConfig.
    """

    name: str
    fingerprint: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    max_model_len: int
    end_token_ids: tuple[int, ...]
    hf_overrides: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "receipt.model.")


@dataclass(frozen=True)
class ReceiptChoice:
    """The tokens of one choice, and why they end. digest: of `output_digest`."""

    index: int
    num_tokens: int
    digest: str
    finish_reason: str
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        check_types(self, "receipt.choices.")
        require_range("receipt.choices.index", self.index, 0, MAX_CHOICES - 1)
        require_range("receipt.choices.num_tokens", self.num_tokens, 1, MAX_TOKENS)


@dataclass(frozen=True)
class Statement:
    """Content of a receipt that the service signs.

    parameters: those of `parameters_of`. noise: NOISE_VERSION. issued_at: Unix time in seconds.
    num_resumed_tokens: leading tokens of the choice that the client supplied.
    """

    model: ReceiptModel
    seed: int
    verifier: str
    parameters: Mapping[str, Any]
    num_prompt_tokens: int
    prompt_digest: str
    choices: tuple[ReceiptChoice, ...]
    num_resumed_tokens: int = 0
    request_id: str = ""
    issued_at: int = 0
    version: int = RECEIPT_VERSION
    noise: int = NOISE_VERSION

    def __post_init__(self) -> None:
        for name in ("seed", "num_prompt_tokens", "num_resumed_tokens", "issued_at", "noise"):
            if type(getattr(self, name)) is not int:
                raise InvalidValueError(f"receipt.{name}", getattr(self, name), "a whole number")
        for name in ("prompt_digest", "request_id", "verifier"):
            if not isinstance(getattr(self, name), str):
                raise InvalidValueError(f"receipt.{name}", getattr(self, name), "a string")
        require_range("receipt.version", self.version, RECEIPT_VERSION, RECEIPT_VERSION)
        require_range("receipt.seed", self.seed, 0, SEED_LIMIT - 1)
        require_choice("receipt.verifier", self.verifier, VERIFIERS)
        indices = [each.index for each in self.choices]
        if not indices or indices != [*range(len(indices))]:
            raise InvalidValueError("receipt.choices", indices, "choice 0 and those that follow it")
        most = min(each.num_tokens for each in self.choices) - 1  # the service generates the last
        require_range("receipt.num_resumed_tokens", self.num_resumed_tokens, 0, most)

    def to_text(self) -> str:
        """Return the JSON text whose bytes are signed."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> Statement:
        """Read the text of `to_text`. Raises InvalidValueError."""
        given = _mapping("receipt.statement", _json("receipt.statement", text))
        model = _mapping("receipt.model", given.get("model"))
        choices = _list("receipt.choices", given.get("choices"), MAX_CHOICES)
        parts = {
            "model": _record(ReceiptModel, "receipt.model", model),
            "parameters": _mapping("receipt.parameters", given.get("parameters")),
            "choices": tuple(
                _record(ReceiptChoice, "receipt.choices", _mapping("receipt.choices", each))
                for each in choices
            ),
        }
        return _record(cls, "receipt.statement", {**given, **parts})


@dataclass(frozen=True)
class Opening:
    """The tokens of the digests of a statement, and their salt as hexadecimal digits.

    A receipt is valid without them, and then shows nothing of prompt and answer.
    """

    salt: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]  # in the order of the statement's choices

    @property
    def salt_bytes(self) -> bytes:
        """The salt. Raises InvalidValueError."""
        try:
            salt = bytes.fromhex(self.salt)
        except ValueError:
            salt = b""
        if len(salt) != SALT_BYTES:
            limit = f"{SALT_BYTES} bytes in hexadecimal"
            raise InvalidValueError("receipt.opening.salt", self.salt, limit)
        return salt


@dataclass(frozen=True)
class Receipt:
    """A signed statement. statement: its text; signature and public_key: Ed25519, hexadecimal."""

    statement: str
    signature: str
    public_key: str
    opening: Opening | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        values = {**vars(self)}
        if self.opening is not None:
            values["opening"] = {**vars(self.opening)}
        return values

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        """Read JSON of `to_mapping`, or of an answer with a receipt. Raises InvalidValueError."""
        if len(text) > MAX_RECEIPT_BYTES:
            raise InvalidValueError("receipt", f"{len(text)} bytes", f"at most {MAX_RECEIPT_BYTES}")
        given = _json("receipt", text)
        receipts = given.get("receipts") if isinstance(given, dict) else None
        if isinstance(receipts, list):
            if len(receipts) != 1:
                raise InvalidValueError("receipts", len(receipts), "1: one prompt's answer")
            [given] = receipts
        return cls.from_mapping(given)

    @classmethod
    def from_mapping(cls, given: Any) -> Receipt:
        """Read the result of `to_mapping`. Raises InvalidValueError."""
        values = dict(_mapping("receipt", given))
        if values.get("opening") is not None:
            values["opening"] = _opening(_mapping("receipt.opening", values["opening"]))
        receipt = _record(cls, "receipt", values)
        for name in ("statement", "signature", "public_key"):
            if not isinstance(getattr(receipt, name), str):
                raise InvalidValueError(f"receipt.{name}", getattr(receipt, name), "a string")
        return receipt


def prompt_digest(salt: bytes, token_ids: Sequence[int]) -> str:
    """Return the salted SHA-256 of a prompt, as hexadecimal digits."""
    return hashlib.sha256(_PROMPT_DOMAIN + salt + _bytes_of(token_ids)).hexdigest()


def output_digest(salt: bytes, choice: int, token_ids: Sequence[int]) -> str:
    """Return the end of a chain of SHA-256 over the tokens of a choice, as hexadecimal digits.

    Each link covers the one before and a token, so that the digest of a beginning of the output
    proves this beginning with the links alone.
    """
    sha256 = hashlib.sha256
    link = sha256(_OUTPUT_DOMAIN + salt + choice.to_bytes(4, "little")).digest()
    numbers = _bytes_of(token_ids)
    for start in range(0, len(numbers), 4):
        link = sha256(link + numbers[start : start + 4]).digest()
    return link.hex()


_RESOLVED = tuple(each.name for each in fields(SamplingDefaults))
_OTHERS = (
    *("presence_penalty", "frequency_penalty", "bad_words", "allowed_token_ids", "min_tokens"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
_KNOWN = {*_RESOLVED, *_OTHERS, "logit_bias", "structured_output"}


def parameters_of(params: SamplingParams, resolved: SamplingDefaults) -> dict[str, Any]:
    """Return the parameters that determine tokens, as plain data.

    resolved: the values of those for which a model has defaults. Other defaults are left out.
    """
    kept = {name: value for name, value in vars(resolved).items() if value is not None}
    for name in _OTHERS:
        if (value := getattr(params, name)) != getattr(_DEFAULT, name):
            kept[name] = value
    if params.logit_bias:
        kept["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if (form := params.structured_output) is not None:
        kept["structured_output"] = {form.kind: getattr(form, form.kind)}
        if form.reasoning is not None:
            kept["structured_output"]["reasoning"] = asdict(form.reasoning)
    return kept


def params_from(parameters: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a statement. Raises InvalidValueError."""
    given = dict(parameters)
    missing = {name for name in _RESOLVED if given.get(name) is None} - {"max_tokens"}
    if unknown := (given.keys() - _KNOWN) | missing:
        limit = "the parameters of this version of receipts"
        raise InvalidValueError("receipt.parameters", sorted(unknown), limit)
    if (biases := given.get("logit_bias")) is not None:
        given["logit_bias"] = _biases(_mapping("receipt.parameters.logit_bias", biases))
    if (form := given.get("structured_output")) is not None:
        given["structured_output"] = _form(_mapping("receipt.parameters.structured_output", form))
    return SamplingParams(**given)


def _form(given: Mapping[str, Any]) -> StructuredOutput:
    if (marks := given.get("reasoning")) is not None:
        name = "structured_output.reasoning"
        given = {**given, "reasoning": _record(ReasoningMarks, name, _mapping(name, marks))}
    return _record(StructuredOutput, "structured_output", given)


def _biases(given: Mapping[str, Any]) -> dict[int, Any]:
    try:
        biases = {int(token): bias for token, bias in given.items()}
    except ValueError:
        biases = {}
    if [*map(str, biases)] != [*given]:  # such as "05" beside "5"
        raise InvalidValueError("receipt.parameters.logit_bias", given, "token ids")
    return biases


def _opening(given: Mapping[str, Any]) -> Opening:
    outputs = _list("receipt.opening.outputs", given.get("outputs"), MAX_CHOICES)
    values = {
        **given,
        "prompt_token_ids": _tokens("prompt_token_ids", given.get("prompt_token_ids")),
        "outputs": tuple(_tokens("outputs", each) for each in outputs),
    }
    opening = _record(Opening, "receipt.opening", values)
    if not isinstance(opening.salt, str):
        raise InvalidValueError("receipt.opening.salt", opening.salt, "hexadecimal")
    return opening


def _tokens(name: str, given: Any) -> tuple[int, ...]:
    tokens = _list(f"receipt.opening.{name}", given, MAX_TOKENS)
    if not tokens or any(type(each) is not int or not 0 <= each < _TOKEN_LIMIT for each in tokens):
        raise InvalidValueError(f"receipt.opening.{name}", tokens[:8], "token ids, at least one")
    return tuple(tokens)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit numbers, signed as in messages."""
    return b"".join([token.to_bytes(4, "little", signed=True) for token in array("i", token_ids)])


def _json(name: str, text: str | bytes) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(name, str(error), "JSON") from None


def _mapping(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise InvalidValueError(name, given, "a JSON object")
    return given


def _list(name: str, given: Any, most: int) -> Sequence[Any]:
    if not isinstance(given, list | tuple) or len(given) > most:
        raise InvalidValueError(name, given, f"a list of at most {most} entries")
    return given


def _record(kind: Callable[..., T], name: str, values: Mapping[str, Any]) -> T:
    """Return a dataclass of plain data. Raises InvalidValueError for missing and unknown fields."""
    try:
        return kind(**values)
    except TypeError as error:
        reason = str(error).partition(") ")[2] or str(error)
        raise InvalidValueError(name, sorted(values), f"of this version: {reason}") from None
