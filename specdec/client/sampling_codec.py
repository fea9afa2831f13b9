"""From SamplingParams to the protos of sampling and speculation; defaults stay unset.

Raises InvalidValueError for what a proto cannot carry; the service checks the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import SamplingParams, SpeculationOptions, StructuredOutput

METHOD_PREFIX = "SPECULATION_METHOD_"
VERIFIER_PREFIX = "VERIFIER_"
_PRESET_PREFIX = "ACCEPTANCE_PRESET_"
_INT32_LIMIT = 2**31

_DEFAULTS = SamplingParams()
_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)
"""What has one name and one form on both sides."""


def encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    """What a request asks of sampling."""
    if params.max_tokens is not None:
        require_int32("max_tokens", params.max_tokens)
    checked_token_ids("stop_token_ids", params.stop_token_ids)
    checked_token_ids("logit_bias.keys", tuple(params.logit_bias))
    values = {name: getattr(params, name) for name in _FIELDS}
    sampling = pb.SamplingParams(
        **{name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    )
    if params.allowed_token_ids is not None:
        ids = checked_token_ids("allowed_token_ids", params.allowed_token_ids)
        sampling.allowed_token_ids.CopyFrom(pb.TokenIds(ids=ids))
    if params.structured_output is not None:
        sampling.structured_output.CopyFrom(_encode_structure(params.structured_output))
    return sampling


def encode_speculation(options: SpeculationOptions) -> pb.SpeculationOptions:
    """What a request asks of speculation."""
    method, verifier = options.method, options.verifier
    return pb.SpeculationOptions(
        enabled=options.enabled,
        num_speculative_tokens=options.num_speculative_tokens,
        method=None if method is None else f"{METHOD_PREFIX}{method.upper()}",
        verifier=None if verifier is None else f"{VERIFIER_PREFIX}{verifier.upper()}",
        typical_epsilon=options.typical_epsilon,
        typical_delta=options.typical_delta,
        scale_draft_temperature=options.scale_draft_temperature,
        **_encode_threshold(options.acceptance_threshold),
    )


def require_int32(field: str, value: int) -> None:
    """Raises InvalidValueError for a number that does not fit into 32 bits."""
    if not -_INT32_LIMIT <= value < _INT32_LIMIT:
        raise InvalidValueError(field, value, "a number of 32 bits")


def checked_token_ids(field: str, token_ids: Sequence[int]) -> Sequence[int]:
    """The same ids. Raises InvalidValueError for one that does not fit into 32 bits."""
    for index, token_id in enumerate(token_ids):
        require_int32(f"{field}[{index}]", token_id)
    return token_ids


def _encode_structure(structure: StructuredOutput) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        json_schema=structure.json_schema,
        json_object=structure.json_object or None,
        regex=structure.regex,
        grammar=structure.grammar,
        choice=pb.TextChoices(texts=structure.choice) if structure.choice else None,
    )


def _encode_threshold(threshold: float | str | None) -> dict[str, Any]:
    if threshold is None:
        return {}
    if isinstance(threshold, str):
        return {"acceptance_preset": f"{_PRESET_PREFIX}{threshold.upper()}"}
    return {"acceptance_probability": threshold}
