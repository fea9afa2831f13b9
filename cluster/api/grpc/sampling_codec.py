"""From the protos of sampling and speculation to SamplingParams, which checks what they say."""

from __future__ import annotations

from typing import Any

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.proto_fields import EnumNames, present_fields
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import (
    ACCEPTANCE_PRESETS,
    VERIFIERS,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

METHODS = EnumNames.of_all_values(pb.SpeculationMethod, "SPECULATION_METHOD")
VERIFIER_NAMES = EnumNames(pb.Verifier, "VERIFIER", VERIFIERS)
_PRESETS = EnumNames(pb.AcceptancePreset, "ACCEPTANCE_PRESET", (*ACCEPTANCE_PRESETS, "auto"))

_OPTIONAL_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "include_stop_str_in_output",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)
_OPTIONAL_SPECULATION_FIELDS = (
    "enabled",
    "num_speculative_tokens",
    "typical_epsilon",
    "typical_delta",
    "scale_draft_temperature",
)


def decode_params(
    sampling: pb.SamplingParams, speculation: pb.SpeculationOptions
) -> SamplingParams:
    """Reads what a request asks of sampling and of speculation."""
    given = present_fields(sampling, *_OPTIONAL_FIELDS)
    if sampling.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = tuple(sampling.allowed_token_ids.ids)
    if sampling.HasField("structured_output"):
        given["structured_output"] = _decode_structure(sampling.structured_output)
    return SamplingParams(
        logit_bias=dict(sampling.logit_bias),
        bad_words=tuple(sampling.bad_words),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        speculation=_decode_speculation(speculation),
        **given,
    )


def _decode_structure(structure: pb.StructuredOutput) -> StructuredOutput:
    form = structure.WhichOneof("form")
    if form is None:
        raise InvalidValueError("structured_output", None, "given a form")
    given: dict[str, Any] = {form: getattr(structure, form)}
    if form == "choice":
        given[form] = tuple(structure.choice.texts)
    return StructuredOutput(**given)


def _decode_speculation(options: pb.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        **present_fields(options, *_OPTIONAL_SPECULATION_FIELDS),
        **METHODS.given("method", options.method),
        **VERIFIER_NAMES.given("verifier", options.verifier),
        **_decode_threshold(options),
    )


def _decode_threshold(options: pb.SpeculationOptions) -> dict[str, Any]:
    match options.WhichOneof("acceptance_threshold"):
        case "acceptance_probability":
            return {"acceptance_threshold": options.acceptance_probability}
        case "acceptance_preset":
            # A number would be a probability: one that is no preset is handed on as text.
            preset = options.acceptance_preset
            return {"acceptance_threshold": _PRESETS.name(preset) or str(preset)}
        case _:
            return {}
