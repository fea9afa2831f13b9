"""vLLM's names for the arguments of `SamplingParams`: translated, or refused with what to write."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.types.errors import InvalidValueError, UnknownNameError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Structure = Callable[[object], object]

_ALL_TOKENS = -1
"""vLLM's value of top_k for all tokens, which is 0 here."""

_STRUCTURES = ("structured_outputs", "guided_decoding")
"""vLLM's present and earlier name of structured_output."""

_LEFT_OUT = "left out"
_OPTIONS = "speculation=SpeculationOptions(...)"
_NO_BEAMS = "left out: beam search is not supported; use n and temperature"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "speculative_sampling": f"left out: for one request write {_OPTIONS}",
        "speculative_config": f"an argument of LLM; for one request write {_OPTIONS}",
        "num_speculative_tokens": "written as speculation=SpeculationOptions("
        "num_speculative_tokens=...)",
        "truncate_prompt_tokens": "left out: give the last tokens of the prompt themselves, as in "
        '{"prompt_token_ids": token_ids[-64:]}',
        "output_kind": "left out: it is an argument of AsyncLLM.generate",
        "logits_processors": "left out: requests cannot contain code; use logit_bias, bad_words, "
        "allowed_token_ids or structured_output",
        "best_of": "left out: use n and select a choice",
        "use_beam_search": _NO_BEAMS,
        "length_penalty": _NO_BEAMS,
        "early_stopping": _NO_BEAMS,
        "spaces_between_special_tokens": "left out: special tokens are not separated",
        "flat_logprobs": "left out: logprobs are dictionaries by token id",
        "extra_args": "left out: there are no extra arguments",
        "skip_reading_prefix_cache": "left out: give the prompt a separate cache_salt",
        "stream_interval": "left out: it is an argument of LLM",
        "thinking_token_budget": "left out: max_tokens limits reasoning and answer together",
        "repetition_detection": "left out: repetitions do not end a text",
        "prompt_logprob_token_ids": "left out: prompt_logprobs has the most likely tokens",
        "prompt_logprob_start": "left out: prompt_logprobs has all tokens of the prompt",
        "routed_experts_prompt_start": "left out: the model's inner state is not returned",
        "trace_decode_token_ids": "left out: requests cannot determine the tokens of the answer",
        "max_new_tokens": "written as max_tokens",
    }
)
"""Arguments of vLLM, and of other engines, with the end of "it must be ..."."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "best_of": (1,),
        "length_penalty": (1, 1.0),
        "output_kind": (0,),
        "prompt_logprob_start": (0,),
        "routed_experts_prompt_start": (0,),
        "spaces_between_special_tokens": (True,),
        "thinking_token_budget": (-1,),
    }
)
"""Values of refused arguments, vLLM's defaults, that request nothing, as every empty value does."""
_EMPTY: tuple[object, ...] = (False, "", [], (), {})
_VLLM_NAMES = frozenset({*REFUSED, *_STRUCTURES, "detokenize"})

_OMITTED_IF_NONE = frozenset(
    {"stop", "stop_token_ids", "bad_words", "logit_bias", "logprob_token_ids", *REFUSED}
)
"""Arguments that are omitted where they are None, vLLM's default of most."""

logger = logging.getLogger(__name__)


def accepts_vllm_names(read_structure: Structure) -> Callable[[type[T]], type[T]]:
    """Return a decorator that lets a dataclass be constructed with vLLM's names of its fields.

    The constructor raises InvalidValueError for an argument of vLLM without a counterpart, and
    UnknownNameError for any other unknown name. Positional arguments are those of the dataclass.

    read_structure: converts vLLM's forms of structured output.
    """

    def decorate(record: type[T]) -> type[T]:
        construct = record.__init__
        known = tuple(each.name for each in fields(record))
        names = frozenset(known)

        @functools.wraps(construct)
        def init(self: T, *args: Any, **given: Any) -> None:
            has_none = any(each is None for each in given.values())
            if has_none or not given.keys() <= names or given.get("top_k") == _ALL_TOKENS:
                given = _in_our_words(given, known, read_structure)
            construct(self, *args, **given)

        record.__init__ = init  # type: ignore[assignment,method-assign]
        record.__setattr__ = _frozen(record, names)  # type: ignore[method-assign]
        return record

    return decorate


def requests_nothing(value: object, neutral: tuple[object, ...] = ()) -> bool:
    """Return whether a value of an unsupported argument is empty or neutral; 1 is not true."""
    return any(type(value) is type(each) and value == each for each in (*_EMPTY, *neutral))


def _frozen(record: Any, names: frozenset[str]) -> Callable[[Any, str, object], None]:
    """Return a `__setattr__` that accepts only attributes that a subclass adds."""
    assign, refused = record.__setattr__, names | _VLLM_NAMES

    def set_attribute(self: Any, name: str, value: object) -> None:
        if type(self) is not record and name not in refused:
            assign(self, name, value)
            return
        fix = f"; write dataclasses.replace(params, {name}=...)" if name in names else ""
        reason = f"{type(self).__name__} cannot be changed{fix}"
        raise FrozenInstanceError(f"cannot assign to {name!r}: {reason}")

    return set_attribute


def _in_our_words(
    given: dict[str, Any], known: tuple[str, ...], read_structure: Structure
) -> dict[str, Any]:
    values = {
        name: each
        for name, each in given.items()
        if each is not None or name not in _OMITTED_IF_NONE
    }
    if values.get("top_k") == _ALL_TOKENS:
        values["top_k"] = 0
    for name in _STRUCTURES:
        if (value := values.pop(name, None)) is not None:
            if values.get("structured_output") is not None:
                raise InvalidValueError(name, value, "left out where another name of it is given")
            values["structured_output"] = read_structure(value)
    if "detokenize" in values:
        _read_detokenize(values.pop("detokenize"))
    for name in values.keys() - set(known):
        hint = REFUSED.get(name, "")
        if hint.startswith(_LEFT_OUT) and requests_nothing(values[name], _NEUTRAL.get(name, ())):
            del values[name]
        else:
            _refuse(name, values[name], known)
    return values


def _read_detokenize(value: object) -> None:
    if type(value) is not bool:
        raise InvalidValueError("detokenize", value, "true or false")
    if not value:
        _note_detokenize()


@functools.cache
def _note_detokenize() -> None:
    """Log once, not for every request."""
    logger.warning("detokenize=False has no effect: outputs have their text beside the token ids")


def _refuse(name: str, value: object, known: tuple[str, ...]) -> None:
    if name in REFUSED:
        raise InvalidValueError(name, value, REFUSED[name])
    nearest = difflib.get_close_matches(name, [*known, *_STRUCTURES], n=1)
    limit = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
    raise UnknownNameError("argument of SamplingParams", name, limit)
