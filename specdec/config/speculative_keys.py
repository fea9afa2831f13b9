"""How `speculative_config` is read: a mapping, JSON text, auto or none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from specdec.config.fields import Limit, refuse_unknown
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import VerifierName

if TYPE_CHECKING:
    from specdec.config.speculative import SpeculativeConfig

# specdec.config.engine loads torch, which takes seconds. The command line reads the settings whatever it
# is asked for, so that module is imported only where a configuration is made.

AUTO: Literal["auto"] = "auto"

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

logger = logging.getLogger(__name__)

SPECULATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "speculative_method": "method",
        "spec_method": "method",
        "speculative_model": "model",
        "spec_model": "model",
        "num_speculative_tokens": "num_speculative_tokens",
        "spec_tokens": "num_speculative_tokens",
        "speculative_model_quantization": "quantization",
        "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
        "speculative_max_model_len": "max_model_len",
        "speculative_disable_by_batch_size": "speculation_threshold",
        "ngram_prompt_lookup_max": "prompt_lookup_max",
        "ngram_prompt_lookup_min": "prompt_lookup_min",
        "typical_acceptance_sampler_posterior_threshold": "typical_epsilon",
        "typical_acceptance_sampler_posterior_alpha": "typical_delta",
        "spec_decoding_acceptance_method": "verifier",
    }
)
"""What was, or is, a flag of its own and stands in speculative_config."""

_OLDER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {**SPECULATION_KEYS, "disable_by_batch_size": "speculation_threshold"}
)
"""Of keys, in texts about earlier versions of vLLM."""

_OLDER_METHODS: Mapping[str, str] = MappingProxyType({"[ngram]": "ngram", "mlp": "mlp_speculator"})
"""Of methods, in the same texts."""

_NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        "draft_sample_method": "left out; how drafts are drawn follows from verifier",
        "use_heterogeneous_vocab": "left out; a draft model with other tokens is found to be one",
        "revision": "left out; model takes it behind an @, as in org/name@revision",
        "speculative_ratio": "num_speculative_tokens, how many tokens to draft",
        "speculative_sampling": "left out; verifier says how drafts are judged",
    }
)
"""Keys of vLLM, or of wrong texts about it, whose meaning there is nothing for here."""

_ONLY_VALUES: Mapping[str, tuple[bool, str]] = MappingProxyType(
    {
        "parallel_drafting": (
            False,
            "false or left out: no draft model is run that was trained to draft in parallel",
        ),
        "disable_padded_drafter_batch": (
            True,
            "true or left out: drafts of different lengths are never padded",
        ),
    }
)
"""Keys of vLLM that can have one value here, which says what is done anyway."""

_VERIFIERS: Mapping[str, VerifierName] = MappingProxyType(
    {
        "standard": "rejection",
        "block": "block",
        "probabilistic": "rejection",  # what standard was called
        "strict": "coupled",  # a draft token is kept if it is the one that the target draws
    }
)
"""What vLLM's values of rejection_sample_method are here; the last two are of earlier versions."""


def _is_speculation(value: object) -> bool:
    from specdec.config.speculative import SpeculativeConfig

    return value is None or isinstance(value, SpeculativeConfig)


SPECULATION = Limit("a mapping, auto, or none to turn speculation off", _is_speculation)


def default_speculation(model: str, device: str, quantization: str) -> SpeculativeConfig:
    """What `auto` stands for: an int8 copy of an alias's model that drafts for it, else n-grams.

    quantization: the target's, beside which such a copy would be no quicker unless it is none.
    """
    from specdec.config.engine import has_fbgemm
    from specdec.config.model_aliases import ALIASES
    from specdec.config.speculative import SpeculativeConfig

    is_quicker = device == "cpu" and quantization == "none" and has_fbgemm()
    if model in ALIASES and ALIASES[model].drafts_for_itself and is_quicker:
        return SpeculativeConfig("draft_model", quantization="int8")
    return SpeculativeConfig("ngram")


def read_speculation(value: object) -> SpeculativeConfig | None:
    """`value` is a mapping, the same as JSON text, or none as a word or as None."""
    from specdec.config.speculative import SpeculativeConfig

    read = as_mapping(value)
    if read == AUTO:
        return cast("SpeculativeConfig", AUTO)
    if read is None:
        return None
    mapping = _in_our_words(dict(read))
    known = [each.name for each in fields(SpeculativeConfig)]
    refuse_unknown("speculative_config key", mapping, known)
    types = get_type_hints(SpeculativeConfig)
    values = {
        name: _read_value(f"speculative_config.{name}", value, types[name])
        for name, value in mapping.items()
    }
    return SpeculativeConfig(**_completed(values))


def as_mapping(value: object) -> Mapping[Any, Any] | Literal["auto"] | None:
    """What `read_speculation` takes, before its keys are judged, older spellings replaced."""
    if value == AUTO:
        return AUTO
    if value is None or value == "none":
        return None
    mapping = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise InvalidValueError("speculative_config", value, SPECULATION.text)
    return _in_todays_words(mapping)


def _in_todays_words(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replaces older spellings of keys, with a line in the log for each."""
    values: dict[Any, Any] = {}
    for key, value in mapping.items():
        if key in _NOT_OFFERED:
            raise InvalidValueError(f"speculative_config.{key}", value, _NOT_OFFERED[key])
        name = _OLDER_SPELLINGS.get(key, key)
        if name != key:
            _warn(f"key {key}", name)
            if name in mapping or name in values:
                raise InvalidValueError(f"speculative_config.{key}", value, f"{name} alone")
        values[name] = value
    return _with_todays_method(values)


def _in_our_words(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Takes vLLM's keys that are spelled otherwise here, or say what holds anyway."""
    values = dict(mapping)
    for key, (only, limit) in _ONLY_VALUES.items():
        if values.pop(key, only) is not only:
            raise InvalidValueError(f"speculative_config.{key}", mapping[key], limit)
    if "rejection_sample_method" not in values:
        return values
    field = "speculative_config.rejection_sample_method"
    method = values.pop("rejection_sample_method")
    if not isinstance(method, str) or method not in _VERIFIERS:
        raise InvalidValueError(field, method, f"one of {', '.join(_VERIFIERS)}; or verifier")
    if "verifier" in values:
        raise InvalidValueError(field, method, "left out where verifier is given")
    return {**values, "verifier": _VERIFIERS[method]}


def _with_todays_method(values: dict[Any, Any]) -> dict[Any, Any]:
    """Prompt lookup used to be spelled with brackets, as if it were a model."""
    if values.get("model") in ("[ngram]", "ngram"):
        _warn(f"model {values['model']}", "method ngram")
        values.setdefault("method", "ngram")
        del values["model"]
    method = values.get("method")
    if isinstance(method, str) and method in _OLDER_METHODS:
        _warn(f"method {method}", _OLDER_METHODS[method])
        values["method"] = _OLDER_METHODS[method]
    return values


def _warn(old: str, new: str) -> None:
    logger.warning("speculative_config: %s is an older spelling of %s", old, new)


def _completed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM does: a model alone is a draft model, and one length of n-grams is the only one."""
    values = dict(mapping)
    if values.get("model") is not None:
        values.setdefault("method", "draft_model")
    lengths = ("prompt_lookup_min", "prompt_lookup_max")
    given = [values[name] for name in lengths if name in values]
    if len(given) == 1:
        values |= dict.fromkeys(lengths, given[0])
    return values


def _read_value(name: str, value: object, expected: Any) -> Any:
    """A value as a field of type `expected` takes it: of a list, a tuple.

    Only the kind of value is judged here; its range is SpeculativeConfig's own affair.
    """
    if get_origin(expected) is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidValueError(name, value, "a list")
        item = get_args(expected)[0]
        return tuple(_read_value(f"{name}[{i}]", each, item) for i, each in enumerate(value))
    is_union = get_origin(expected) in (Union, UnionType)
    allowed = get_args(expected) if is_union else (expected,)
    kinds = {str if get_origin(each) is Literal else each for each in allowed}
    is_whole_for_number = float in kinds and type(value) is int
    if type(value) not in kinds and not is_whole_for_number:  # to isinstance, True is an int
        raise InvalidValueError(name, value, " or ".join(_WORDS[k] for k in _WORDS if k in kinds))
    return value


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        limit = f"a JSON mapping, or none ({error})"
        raise InvalidValueError("speculative_config", text, limit) from error
