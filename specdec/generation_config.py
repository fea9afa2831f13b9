"""What a model's `generation_config.json` asks for where a request says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specdec.errors import InvalidValueError, UnsupportedModelError
from specdec.sampling_params import SamplingDefaults, SamplingParams

_SPELLINGS = {"max_tokens": "max_new_tokens"}


def read_sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """The fields that it has and that are not null. Raises UnsupportedModelError for a bad value.

    `do_sample` is not regarded, as vLLM does not regard it: a temperature is asked for by number.
    """
    names = {each.name: _SPELLINGS.get(each.name, each.name) for each in fields(SamplingDefaults)}
    given = {
        name: generation[spelling]
        for name, spelling in names.items()
        if generation.get(spelling) is not None
    }
    if given.get("top_k") == -1:  # another way to say all
        given["top_k"] = 0
    try:
        SamplingParams(**given)
        return SamplingDefaults(**given)
    except (InvalidValueError, TypeError) as error:
        raise UnsupportedModelError(f"generation_config.json: {error}") from error
