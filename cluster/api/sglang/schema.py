"""Requests of SGLang's `/generate` and `/abort_request`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from cluster.api.base.openai_schema import RequestModel, at_most, number, option
from cluster.api.base.unsupported_fields import ENGINE_FIELDS
from cluster.api.openai.schemas.completion_schema import MAX_PROMPTS
from cluster.api.openai.schemas.sampling_fields import Biases, Speculation
from cluster.replica.limits import MAX_TOKEN_IDS
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""

_TEXT_ONLY = "left out: the models read text only"
_ListedIds = Annotated[list[int], at_most(MAX_LOGPROB_TOKEN_IDS)]
_TokenIds = Annotated[list[int], at_most(MAX_TOKEN_IDS, 1)]


class SglSamplingParams(RequestModel):
    """SGLang's sampling parameters; the model's generation_config.json has the defaults."""

    refused: ClassVar[Mapping[str, str]] = {
        "structural_tag": "left out: use regex, json_schema or ebnf",
        "custom_params": "left out: requests cannot contain code",
        "beam_width": "left out: beam search is not supported",
        "stop_regex": "left out: use stop",
    }

    max_new_tokens: int | None = number("most tokens to generate; 0 only reads the prompt", 0)
    min_new_tokens: int | None = number("tokens before the text may end", 0)
    n: int | None = number("choices of each prompt", 1, 128)
    temperature: float | None = number("divides the logits; 0 is greedy", 0, 100)
    top_p: float | None = number("keeps the most likely tokens with this probability", 0, 1)
    top_k: int | None = number("keeps this number of tokens; -1 keeps all", -1)
    min_p: float | None = number("keeps tokens relative to the most likely one", 0, 1)
    frequency_penalty: float | None = number("subtracted for each occurrence", -2, 2)
    presence_penalty: float | None = number("subtracted for tokens that occurred", -2, 2)
    repetition_penalty: float | None = number("divides positive logits of seen tokens", 0, 100)
    stop: str | Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None = option("ends the text")
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = option(
        "tokens that end the text"
    )
    ignore_eos: bool = option("continues after an end-of-sequence token", False)
    skip_special_tokens: bool = option("leaves special tokens out of the text", True)
    spaces_between_special_tokens: bool | None = option("accepted; there are no such spaces")
    no_stop_trim: bool = option("keeps the stop string in the text", False)
    regex: str | None = option("a text that matches this regular expression")
    json_schema: str | dict[str, Any] | None = option("JSON that matches this schema")
    ebnf: str | None = option("a text of this grammar")
    logit_bias: Biases | None = option("added to the logits, by token id")
    sampling_seed: int | None = number("seed of all random choices; -1: random")


class GenerateRequest(RequestModel):
    """A request of `/generate`: one prompt or several, as texts or as token ids."""

    refused: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in ENGINE_FIELDS.items() if name != "extra_key"},
        "extra_key": "left out: there is no key of the cache",
        "background": "left out: the answer is sent where the request came from",
        "input_embeds": "left out: give text or input_ids",
        "image_data": _TEXT_ONLY,
        "video_data": _TEXT_ONLY,
        "audio_data": _TEXT_ONLY,
        "modalities": _TEXT_ONLY,
    }
    api_names: ClassVar[Mapping[str, str]] = {
        "token_ids": "input_ids",
        "prompt": "text",
        "prompt length": "text length",
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "seed": "sampling_params.sampling_seed",
        "structured_output.regex": "sampling_params.regex",
        "structured_output.json_schema": "sampling_params.json_schema",
        "structured_output.grammar": "sampling_params.ebnf",
        "logprobs": "top_logprobs_num",
        "logprob_token_ids": "token_ids_logprob",
        "request_id": "rid",
        **{
            name: f"sampling_params.{name}"
            for name in (
                *("n", "temperature", "top_p", "top_k", "min_p"),
                *("stop", "stop_token_ids", "logit_bias"),
            )
        },
    }

    text: str | Annotated[list[str], at_most(MAX_PROMPTS, 1)] | None = option("the prompts")
    input_ids: _TokenIds | Annotated[list[_TokenIds], at_most(MAX_PROMPTS, 1)] | None = option(
        "the prompts, in place of text"
    )
    sampling_params: (
        SglSamplingParams | Annotated[list[SglSamplingParams], at_most(MAX_PROMPTS, 1)] | None
    ) = option("for all prompts, or one for each")
    rid: str | Annotated[list[str], at_most(MAX_PROMPTS, 1)] | None = option(
        "ids of the requests, for /abort_request"
    )
    return_logprob: bool | Annotated[list[bool], at_most(MAX_PROMPTS)] = option(
        "returns log-probabilities", False
    )
    logprob_start_len: int | Annotated[list[int], at_most(MAX_PROMPTS)] | None = option(
        "place in the prompt from which it has log-probabilities; -1 for its end, the default"
    )
    top_logprobs_num: int | Annotated[list[int], at_most(MAX_PROMPTS)] | None = option(
        "number of most likely tokens at each position"
    )
    token_ids_logprob: (
        Annotated[list[int | _ListedIds | None], at_most(MAX_LOGPROB_TOKEN_IDS)] | None
    ) = option(
        "token ids to list at each position, for all prompts or for each; needs return_logprob; at "
        "most 128"
    )
    return_text_in_logprobs: bool = option("returns tokens also as texts", False)
    stream: bool = option("streams the texts so far as server-sent events", False)
    lora_path: str | Annotated[list[str], at_most(MAX_PROMPTS)] | None = option(
        "name of a loaded adapter, for all prompts or for each"
    )
    priority: int = option("lower is scheduled first", 0)
    speculation: Speculation | None = option("speculation options of this request")

    @property
    def model(self) -> str | None:
        """The adapter of all prompts, if they have the same."""
        return self.lora_path if isinstance(self.lora_path, str) else None

    @property
    def num_choices(self) -> int:
        """Choices of all prompts. Raise InvalidValueError."""
        return sum(each.n or 1 for each in self.of_each("sampling_params", SglSamplingParams()))

    @property
    def is_batch(self) -> bool:
        """Return whether the response is a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raise InvalidValueError unless one is given."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidValueError("text", self.text, "given, or left out with input_ids")
        given: Any = self.input_ids if self.text is None else self.text
        return list(given) if self.is_batch else [given]

    def of_each(self, name: str, default: Any) -> list[Any]:
        """Return the values of a field, one for each prompt. Raise InvalidValueError."""
        given, count = getattr(self, name), len(self.prompts)
        if not isinstance(given, list):
            return [default if given is None else given] * count
        if len(given) != count:
            raise InvalidValueError(f"{name} length", len(given), f"the number of prompts: {count}")
        return given

    @property
    def listed_ids(self) -> list[tuple[int, ...]]:
        """The tokens to list, by prompt. Raise InvalidValueError for another number of lists."""
        given = self.token_ids_logprob or []
        shared = [each for each in given if isinstance(each, int)]
        if len(shared) == len(given):
            return [tuple(shared)] * len(self.prompts)
        if shared:
            raise InvalidValueError("token_ids_logprob", shared[0], "token ids, or lists of them")
        return [tuple(each or ()) for each in self.of_each("token_ids_logprob", None)]


class AbortRequest(RequestModel):
    """A request of `/abort_request`."""

    rid: str = Field("", max_length=128, description="id of the request to end")
    abort_all: bool = option("ends the requests of all clients, for operators", False)

    def check_together(self) -> None:
        """Raise InvalidValueError without a request to end."""
        if not (self.rid or self.abort_all):
            raise InvalidValueError("rid", self.rid, "given unless abort_all is true")


class FlushRequest(RequestModel):
    """A request of `/flush_cache`."""

    empty_cache: bool = option("accepted; memory is not returned to the system", True)
