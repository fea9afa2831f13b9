"""Random requests: prompts and sampling parameters of every kind, each a function of its seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any

from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import SamplingParams, StructuredOutput

STEMS = (
    "The river begins as a thread of cold water under the stones",
    "Write a JSON object about a customer.",
    "Repeat: the quick brown fox. the quick brown fox. the quick brown fox. the quick",
    "def measure(depth, width, speed): return depth * width",
    "1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3",
    "Ein Witz 😀 mit Emojis 🎉🎉 und 日本語",
)
"""Beginnings of prompts, which are few, so that prefixes are cached and texts repeat."""

_TAILS = ("", " The water", " Ask the baker, ask the children: the river", "\n", " é", " 7")
_WORDS = ("name", "city", "price", "count", "status", "tags", "note", "date", "kind", "owner")
_STOPS = ("\n", "the", "}", ".", "e ", " a", "er", "t", "😀", '"', "<|im_end|>")
_TOKEN_IDS = range(3, 300)
"""In the vocabulary of every model: most are single bytes or short words."""

_Make = Callable[[Random], Any]


def _some(low: int, high: int) -> _Make:
    return lambda random: random.sample(_TOKEN_IDS, random.randint(low, high))


def _words(random: Random) -> tuple[str, ...]:
    return tuple(random.sample((" the", "a", "name", "1", "er", "\n"), random.randint(1, 3)))


_OPTIONS: Mapping[str, tuple[float, _Make]] = MappingProxyType(
    {
        "top_p": (0.3, lambda random: random.choice((0.5, 0.9, 0.95))),
        "top_k": (0.3, lambda random: random.choice((1, 2, 5, 40))),
        "min_p": (0.2, lambda random: random.choice((0.02, 0.1))),
        "repetition_penalty": (0.2, lambda random: random.choice((0.9, 1.1, 1.3))),
        "presence_penalty": (0.2, lambda random: random.choice((-1, 0.5, 2))),
        "frequency_penalty": (0.2, lambda random: random.choice((-1, 0.5, 1.5))),
        "logit_bias": (
            0.2,
            lambda random: {
                each: random.choice((-100.0, -3.0, 3.0, 8.0, 100.0))
                for each in random.sample(_TOKEN_IDS, 4)
            },
        ),
        "min_tokens": (0.2, lambda random: random.randint(1, 40)),
        "stop": (0.25, lambda random: tuple(random.sample(_STOPS, random.randint(1, 3)))),
        "stop_token_ids": (0.15, _some(1, 20)),
        "include_stop_str_in_output": (0.2, lambda random: True),
        "bad_words": (0.15, _words),
        # Few tokens repeat, so that penalties and lookups have an effect.
        "allowed_token_ids": (
            0.15,
            lambda random: random.sample(_TOKEN_IDS, random.choice((3, 8, 100))),
        ),
        "ignore_eos": (0.3, lambda random: True),
        "skip_special_tokens": (0.2, lambda random: False),
        "logprobs": (0.2, lambda random: random.choice((0, 1, 5))),
        "prompt_logprobs": (0.08, lambda random: random.choice((0, 2))),
        "logprob_token_ids": (0.05, _some(1, 4)),
        "n": (0.15, lambda random: random.randint(2, 3)),
        "structured_output": (0.3, lambda random: _structure(random)),
    }
)
"""Share of the requests that have an option, and its value."""


@dataclass(frozen=True)
class RandomRequest:
    """A request. params: arguments of SamplingParams. adapter: number of one; 0 for none.

    num_until_abort: output tokens after which its stream is left with drafts; None reads all of it.
    speculation: arguments of SpeculationOptions. is_predicted: whether its output is predicted.
    """

    prompt: str
    params: Mapping[str, Any]
    cache_salt: str = ""
    adapter: int = 0
    num_until_abort: int | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict)
    is_predicted: bool = False

    @classmethod
    def of(cls, random: Random, earlier: Sequence[RandomRequest] = ()) -> RandomRequest:
        """Return the next request of a generator; a quarter repeat an earlier one, or most of it.

        So prefixes are cached, and drafts from earlier outputs are right.
        """
        params, prompt = _params(random), random.choice(STEMS)
        if earlier and random.random() < 0.25:
            one = random.choice(earlier)
            prompt, params = one.prompt, {**one.params, "max_tokens": params["max_tokens"]}
            params |= {"min_tokens": 1} if "min_tokens" in params else {}
        return cls(
            prompt=prompt + random.choice(_TAILS) * random.choice((0, 1, 1, 4)),
            params=params,
            cache_salt=random.choice(("", "", "", "salt")),
            adapter=random.choice((0, 1, 2)),
            num_until_abort=random.randint(0, 20) if random.random() < 0.08 else None,
            speculation=_speculation(random, is_greedy=params["temperature"] == 0),
            is_predicted=random.random() < 0.2,
        )

    def is_left_after(self, num_tokens: int) -> bool:
        """Return whether the stream is left after `num_tokens` output tokens."""
        return self.num_until_abort is not None and num_tokens >= self.num_until_abort

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters without those of speculation."""
        values = dict(self.params)
        if structure := values.get("structured_output"):
            values["structured_output"] = StructuredOutput(**structure)
        return SamplingParams(**values)


def _params(random: Random) -> dict[str, Any]:
    params = {
        "temperature": random.choice((0, 0, 0.2, 0.7, 1.0, 1.5)),
        "seed": random.randrange(6),
        "max_tokens": random.choice((None, 1, 2, *[random.randint(3, 60)] * 12)),
    }
    params |= {
        name: make(random) for name, (share, make) in _OPTIONS.items() if random.random() < share
    }
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"] or 40)
    return params


def _speculation(random: Random, *, is_greedy: bool) -> dict[str, Any]:
    """Return options of SpeculationOptions that change no token."""
    found: dict[str, Any] = {}
    if random.random() < 0.1:
        found["enabled"] = random.random() < 0.5
    if random.random() < 0.15:
        found["num_speculative_tokens"] = random.randint(0, 9)
    if random.random() < 0.1:
        found["draft_confidence_threshold"] = random.choice((0.1, 0.5))
    if random.random() < 0.1:
        found["scale_draft_temperature"] = True
    if is_greedy and random.random() < 0.15:
        found["verifier"] = random.choice(("rejection", "block"))
    return found


_REASONING = (
    ReasoningMarks(("q",), ("e", "st"), begins_inside=True),
    ReasoningMarks(("zq", "t"), ("er", ".")),
)
"""Marks that come soon in random text, also within tokens such as `the`."""


def _structure(random: Random) -> dict[str, Any]:
    reasoning = random.choice(_REASONING) if random.random() < 0.4 else None
    return {**_form(random), "reasoning": reasoning}


def _form(random: Random) -> dict[str, Any]:
    kind = random.choice(
        ("json_schema", "json_schema", "regex", "choice", "grammar", "json_object")
    )
    if kind == "json_schema":
        return {kind: json.dumps(_schema(random))}
    if kind == "choice":
        pairs = [f"{random.choice(_WORDS)} {random.choice(_WORDS)}" for _ in range(4)]
        return {kind: tuple(dict.fromkeys(pairs))}
    return {kind: True if kind == "json_object" else random.choice(_TEXTS_OF[kind])}


_TEXTS_OF = {
    "regex": (
        r"[a-z]{3,10}( [a-z]{2,8}){2,6}\.",
        r"(yes|no|maybe)(, (yes|no|maybe)){1,8}",
        r"\d{1,3}(\.\d{1,3}){3}",
        r"[A-Z][a-z]+ replied: \"[^\"]{5,60}\"",
        r"(- [A-Za-z ]{3,25}\n){3,6}",
        r"(a|ab|abc|b|bc)*",
        r"[^a]{3,30}",
    ),
    "grammar": (
        'start: item (", " item)* "."\nitem: /[a-z]{2,10}/ | NUMBER\nNUMBER: /[0-9]{1,4}/',
        'start: "<" name ">" /[^<]{1,40}/ "</" name ">"\nname: "a" | "b" | "title"',
        'root ::= "(" root ")" | [a-z]+',
    ),
}


def _schema(random: Random, depth: int = 0) -> dict[str, Any]:
    kinds = [*_LEAVES, "array", "anyOf", "object"] if depth < 3 else [*_LEAVES]
    kind = random.choice(kinds)
    if kind in _LEAVES:
        return random.choice(_LEAVES[kind])
    if kind == "array":
        sizes = {"minItems": random.randint(0, 2), "maxItems": random.randint(2, 5)}
        return {"type": "array", "items": _schema(random, depth + 1), **sizes}
    if kind == "anyOf":
        return {"anyOf": [_schema(random, depth + 1) for _ in range(random.randint(2, 3))]}
    names = random.sample(_WORDS, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth + 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": random.random() < 0.2,
    }


_LEAVES: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "string": (
            {"type": "string"},
            {"type": "string", "maxLength": 5},
            {"type": "string", "minLength": 2, "maxLength": 20},
        ),
        "integer": ({"type": "integer"}, {"type": "integer", "minimum": -7, "maximum": 1200}),
        "number": ({"type": "number"},),
        "boolean": ({"type": "boolean"}, {"type": "null"}),
        "enum": ({"enum": ["red", "green", "greenish", 1, None]}, {"const": "yes we can"}),
        "pattern": (
            {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
            {"type": "string", "pattern": "^(foo|bar)+$"},
        ),
        "format": (
            {"type": "string", "format": "date"},
            {"type": "string", "format": "email"},
            {"type": "string", "format": "uuid"},
        ),
    }
)


def random_requests(name: str, count: int) -> tuple[RandomRequest, ...]:
    """Return `count` requests, each a function of a name and its index."""
    found: list[RandomRequest] = []
    for index in range(count):
        found.append(RandomRequest.of(Random(f"{name}/{index}"), found))
    return tuple(found)
