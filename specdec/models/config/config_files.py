"""The files of a model directory that describe it: config.json and generation_config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec.config.engine import ModelImpl, ModelOptions
from specdec.config.json_values import count, require_keys, unsupported, whole
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.fixed_values import require_fixed
from specdec.models.config.families.key_types import TypedKeys
from specdec.models.config.families.text_models import (
    TEXT_MODELS,
    TextModel,
    WholeModel,
    without_image_positions,
)
from specdec.models.config.registry import (
    ARCHITECTURES,
    SAME_DECODERS,
    architecture_of,
)
from specdec.models.config.transformers_config import transformers_fault
from specdec.models.config.unsupported import explain_unsupported
from specdec.types.errors import InvalidValueError, UnsupportedModelError, reason_of
from specdec.types.sampling.sampling_params import SamplingDefaults, SamplingParams

logger = logging.getLogger(__name__)

DecoderFields = tuple[str, Architecture, Mapping[str, Any]]
"""The name of a decoder's architecture, what is known of it, and the keys of its config.json."""

GENERATION_CONFIG = "generation_config.json"
_MAX_LAYERS = 10_000
_SPELLINGS = {"max_tokens": "max_new_tokens"}
_WHOLE = ("top_k", "max_tokens")

_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def read_sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the fields of generation_config.json that are set and not null.

    `do_sample` is ignored, as in vLLM: the temperature is a number. Raises UnsupportedModelError
    for an invalid value.
    """
    names = {each.name: _SPELLINGS.get(each.name, each.name) for each in fields(SamplingDefaults)}
    given: dict[str, Any] = {
        name: whole(generation[spelling]) if name in _WHOLE else generation[spelling]
        for name, spelling in names.items()
        if generation.get(spelling) is not None
    }
    if given.get("top_k") == -1:  # all tokens, as 0
        given["top_k"] = 0
    try:
        SamplingParams(**given)
        return SamplingDefaults(**given)
    except InvalidValueError as error:
        limit = f"{error.limit} (--generation-config none leaves it out)"
        raise unsupported(names[error.field], error.value, limit, GENERATION_CONFIG) from error


def supported_architecture(raw: Mapping[str, Any]) -> str:
    """Return the name of a supported architecture, by `architectures` or by `model_type`.

    It may be one of TEXT_MODELS.

    Raises UnsupportedModelError, with the reason, for others and for quantized weights that cannot
    be read.
    """
    names = raw.get("architectures")
    if not isinstance(names, list | None):
        raise unsupported("architectures", names, "a list of names")
    found = str(names[0]) if names else architecture_of(str(raw.get("model_type")))
    architecture = SAME_DECODERS.get(found or "", found)
    if architecture is None or architecture not in {*ARCHITECTURES, *TEXT_MODELS}:
        raise UnsupportedModelError(explain_unsupported(architecture, raw))
    if (quantization := raw.get("quantization_config")) is not None:
        from specdec.models.weights.dequantize import (
            weight_format,  # imports torch, which few processes need
        )

        weight_format(quantization)
    return architecture


def needs_transformers(raw: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    """Return whether transformers' code runs a model.

    Raises UnsupportedModelError, with the reason, for a model that it would have to run and cannot.
    """
    names = raw.get("architectures") or [architecture_of(str(raw.get("model_type")))]
    found = names[0] if isinstance(names, list) else names
    if not isinstance(found, str | None) or model_impl == "specdec":
        return False
    if model_impl == "auto" and found in {*ARCHITECTURES, *SAME_DECODERS, *TEXT_MODELS}:
        return False
    if fault := transformers_fault(raw):
        if model_impl == "auto":
            raise UnsupportedModelError(explain_unsupported(found, raw, fault))
        raise UnsupportedModelError(f"model_impl transformers cannot run the model: {fault}")
    return True


def _text_model(whole: WholeModel, raw: Mapping[str, Any]) -> tuple[TextModel, Mapping[str, Any]]:
    """Return the text model, and its keys with those that it shares with the whole."""
    nested = raw.get("text_config")
    if nested is None and whole.may_be_flat:
        return whole.texts[0], raw
    if not isinstance(nested, dict):
        raise unsupported("text_config", nested, "an object")
    texts = {each.model_type: each for each in whole.texts}
    found = nested.get("model_type", whole.texts[0].model_type)
    if found not in texts:
        raise unsupported("text_config.model_type", found, " or ".join(texts))
    shared = (
        *("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype"),
        "quantization_config",
    )
    return texts[found], nested | {key: raw[key] for key in shared if raw.get(key) is not None}


def num_layers_of(raw: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises UnsupportedModelError."""
    num_layers = count(raw, "num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise unsupported("num_hidden_layers", num_layers, f"at most {_MAX_LAYERS}")
    return num_layers


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None without one. Raises UnsupportedModelError."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())  # of bytes it allows a byte order mark
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return content


def read_generation_config(directory: Path, options: ModelOptions) -> dict[str, Any]:
    """Return the keys of generation_config.json that are used.

    Raises UnsupportedModelError for a malformed file; where it has end tokens alone it is logged.
    """
    path = directory / GENERATION_CONFIG
    try:
        content = read_json(path) or {}
    except UnsupportedModelError as error:
        if options.has_defaults:
            raise
        logger.warning("%s; end tokens are those of the other files", error)
        return {}
    ends = {key: content[key] for key in ("eos_token_id",) if key in content}
    return content if options.has_defaults else ends


@contextmanager
def errors_of(directory: Path) -> Iterator[None]:
    """Raise errors of reading a model's configuration as UnsupportedModelError with its place."""
    try:
        yield
    except UnsupportedModelError as error:
        if str(directory) in str(error):
            raise
        raise UnsupportedModelError(f"{directory}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        message = f"{directory} has an invalid config.json ({reason_of(error)})"
        raise UnsupportedModelError(message) from error


def decoder_of(whole: str, raw: Mapping[str, Any]) -> DecoderFields:
    """Return the architecture of the decoder, and its fields with the defaults of its family.

    Raises UnsupportedModelError for a value that the decoder does not have; the fields raise it for
    one of another type.
    """
    if whole in TEXT_MODELS:
        text, keys = _text_model(TEXT_MODELS[whole], raw)
        architecture, raw = text.architecture, {**text.defaults, **without_image_positions(keys)}
    else:
        architecture = whole
    family = ARCHITECTURES[architecture]
    require_fixed(architecture, raw)
    fields = TypedKeys({**family.config_defaults, **raw})
    require_keys(fields, (*_REQUIRED_KEYS, family.norm_eps_key))
    if fields["num_hidden_layers"] is not None:
        num_layers_of(fields)  # before the rules of families make lists of that length
    return architecture, family, fields
