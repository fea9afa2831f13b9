"""Reads `speculative_config`: a mapping, JSON text, auto or none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from specdec.config.fields import Limit, refuse_unknown
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import VerifierName
from specdec.types.validation import unique_keys

if TYPE_CHECKING:
    from specdec.config.speculation.speculative import SpeculativeConfig

# The command line reads the settings for every command; the modules of a configuration are
# imported only where one is made, so that other commands start fast.

AUTO: Literal["auto"] = "auto"

_TYPE_TEXTS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

logger = logging.getLogger(__name__)

SPECULATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "spec_method": "method",
        "speculative_model": "model",
        "spec_model": "model",
        "num_speculative_tokens": "num_speculative_tokens",
        "spec_tokens": "num_speculative_tokens",
        "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
        "speculative_disable_by_batch_size": "speculation_threshold",
        "ngram_prompt_lookup_max": "prompt_lookup_max",
        "ngram_prompt_lookup_min": "prompt_lookup_min",
    }
)
"""vLLM's flags for single keys of speculative_config: those of its current release, and those of
the documentation of v0.6 that are still in use."""

_OTHER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {**SPECULATION_KEYS, "disable_by_batch_size": "speculation_threshold"}
)


class _NoEffect(NamedTuple):
    """A key of vLLM that is accepted with a note. values: those that it has there."""

    values: tuple[bool | str, ...]
    note: str


_NO_EFFECT: Mapping[str, _NoEffect] = MappingProxyType(
    {
        "disable_padded_drafter_batch": _NoEffect(
            (True, False), "drafts of different lengths are never padded"
        ),
        "use_heterogeneous_vocab": _NoEffect(
            (True, False), "whether the vocabularies differ is detected from the tokenizers"
        ),
        "draft_sample_method": _NoEffect(
            ("greedy", "probabilistic"),
            "the verifier determines how drafts are sampled, and all lossless ones are exact",
        ),
        "enforce_eager": _NoEffect((True, False), "it is an argument of the target alone"),
    }
)
"""Keys of vLLM that make no difference here, whatever their value."""

_VERIFIERS: Mapping[str, VerifierName] = MappingProxyType(
    {"standard": "rejection", "block": "block", "synthetic": "synthetic"}
)
"""Verifier by vLLM's rejection_sample_method."""


def _is_speculation(value: object) -> bool:
    from specdec.config.speculation.speculative import SpeculativeConfig

    return value is None or isinstance(value, SpeculativeConfig)


SPECULATION = Limit(
    "a JSON object (a mapping), auto, or none to disable speculation", _is_speculation
)


def default_speculation(model: str, device: str) -> SpeculativeConfig:
    """Return the meaning of `auto`: for an alias the first of its drafters, else n-grams.

    Where the machine is known, `specdec.llm.drafter_choice` takes the fastest of them instead.
    """
    from specdec.config.speculation.speculative import SpeculativeConfig

    keys = default_keys(model, device)
    found = SpeculativeConfig.of(**keys)
    return replace(found, left_out=frozenset({"drafter"})) if keys else found


def default_keys(model: str, device: str) -> dict[str, Any]:
    """Return the keys of an alias's first drafter; none for another model."""
    from specdec.config.model_aliases import ALIASES

    drafters = ALIASES[model].drafters if model in ALIASES else ()
    return drafters[0].keys(device) if drafters else {}


def read_speculation(value: object) -> SpeculativeConfig | None:
    """Return the configuration of a mapping, of the same as JSON text, or of none or None.

    Raise InvalidValueError, which names the key, the value and the limit.
    """
    from specdec.config.speculation.method_roles import OTHER_ROLES
    from specdec.config.speculation.speculative import SpeculativeConfig, key_types

    read = as_mapping(value)
    if read == AUTO:
        return cast("SpeculativeConfig", AUTO)
    if read is None:
        return None
    mapping, types = _without_vllm_keys(dict(read)), key_types()
    refuse_unknown("speculative_config key", mapping, types)
    values = {
        name: _read_role(name, value, types)
        if name in OTHER_ROLES and isinstance(value, Mapping)
        else read_value(f"speculative_config.{name}", value, types[name])
        for name, value in mapping.items()
    }
    return SpeculativeConfig.of(**_completed(values))


def _read_role(role: str, given: Mapping[Any, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of a role, with values of the right types."""
    field = f"speculative_config.{role}"
    refuse_unknown(f"{field} key", given, types)
    return _completed(
        {name: read_value(f"{field}.{name}", value, types[name]) for name, value in given.items()}
    )


def as_mapping(value: object) -> Mapping[Any, Any] | Literal["auto"] | None:
    """Return the keys that `read_speculation` checks, other spellings replaced."""
    if value == AUTO:
        return AUTO
    if value is None or value == "none":
        return None
    mapping = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise InvalidValueError("speculative_config", value, SPECULATION.text)
    return _with_replaced_spellings(mapping)


def _with_replaced_spellings(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace other spellings of keys, and log a warning for each."""
    values: dict[Any, Any] = {}
    for key, value in mapping.items():
        name = _OTHER_SPELLINGS.get(key, key)
        if name != key:
            _warn(f"key {key}", name)
            if name in mapping or name in values:
                raise InvalidValueError(f"speculative_config.{key}", value, f"{name} alone")
        values[name] = value
    if values.get("model") in ("[ngram]", "ngram"):  # vLLM 0.6 named prompt lookup as a model
        _warn(f"model {values['model']}", "method ngram")
        values.setdefault("method", "ngram")
        del values["model"]
    return values


def _without_vllm_keys(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Replace vLLM's keys that have another name here, and drop those without an effect."""
    values = {key: value for key, value in mapping.items() if key not in _NO_EFFECT}
    for key, (allowed, note) in _NO_EFFECT.items():
        if key in mapping:
            _check_no_effect(f"speculative_config.{key}", mapping[key], allowed, note)
    if "rejection_sample_method" not in values:
        return values
    field = "speculative_config.rejection_sample_method"
    method = values.pop("rejection_sample_method")
    if not isinstance(method, str) or method not in _VERIFIERS:
        raise InvalidValueError(field, method, f"one of {', '.join(_VERIFIERS)}; or verifier")
    if "verifier" in values:
        raise InvalidValueError(field, method, "left out where verifier is given")
    return {**values, "verifier": _VERIFIERS[method]}


def _check_no_effect(field: str, value: object, allowed: tuple[bool | str, ...], note: str) -> None:
    if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
        known = " or ".join(str(each).lower() for each in allowed)
        raise InvalidValueError(field, value, f"{known}, or left out: {note}")
    logger.warning("%s has no effect and may be left out: %s", field, note)


def _warn(old: str, new: str) -> None:
    logger.warning("speculative_config: %s is an older spelling of %s", old, new)


def _completed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Add what vLLM infers: the method of a name, and the other bound of one n-gram length.

    Method pard is a draft model that drafts in parallel; the parallel form of a head has a name.
    """
    from specdec.config.speculation.methods import other_method_names, parallel_form

    values = dict(mapping)
    if isinstance(given := values.get("method"), str):
        values["method"] = name = other_method_names().get(given, given)
        parallel = parallel_form(name)
        if parallel is not None and values.get("parallel_drafting"):
            values["method"] = parallel
            del values["parallel_drafting"]
    if values.get("method") == "pard":
        if not values.setdefault("parallel_drafting", True):
            limit = "true or left out where method is pard"
            raise InvalidValueError("speculative_config.parallel_drafting", False, limit)
        values["method"] = "draft_model"
    lengths = ("prompt_lookup_min", "prompt_lookup_max")
    bounds = [values[name] for name in lengths if name in values]
    if len(bounds) == 1:
        values |= dict.fromkeys(lengths, bounds[0])
    return values


def read_value(name: str, value: object, expected: Any) -> Any:
    """Return a value as a field of type `expected` holds it: a tuple in place of a list.

    Only the type is checked here; SpeculativeConfig checks ranges.
    """
    if get_origin(expected) is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidValueError(name, value, "a list")
        item = get_args(expected)[0]
        return tuple(read_value(f"{name}[{i}]", each, item) for i, each in enumerate(value))
    is_union = get_origin(expected) in (Union, UnionType)
    allowed = get_args(expected) if is_union else (expected,)
    types = {str if get_origin(each) is Literal else each for each in allowed}
    is_whole_for_number = float in types and type(value) is int
    if type(value) not in types and not is_whole_for_number:  # to isinstance, True is an int
        limit = " or ".join(_TYPE_TEXTS[each] for each in _TYPE_TEXTS if each in types)
        raise InvalidValueError(name, value, limit)
    return value


def _parse_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        limit = f'a JSON object such as {{"method": "ngram"}}, auto, or none ({error})'
        raise InvalidValueError("speculative_config", text, limit) from error
