"""Generate docs/openai-reference.md: the fields of the OpenAI API, from the schema.

python -m tools.openai_reference [check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from cluster.api.base.openai_schema import RequestModel, StreamOptions
from cluster.api.openai.schemas.chat_schema import (
    ChatRequest,
    FunctionDefinition,
    Message,
    Prediction,
)
from cluster.api.openai.schemas.completion_schema import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.api.openai.schemas.output_format import (
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from cluster.api.openai.schemas.responses_schema import ResponsesRequest, TextFormat
from cluster.api.openai.schemas.sampling_fields import SamplingFields, Speculation
from tools.generated_files import run

PAGE = Path("docs/openai-reference.md")
SECTIONS: Mapping[str, type[RequestModel]] = {
    "Chat and text completions": SamplingFields,
    "`stream_options`": StreamOptions,
    "`speculation`": Speculation,
    "`response_format`": ResponseFormat,
    "`response_format.json_schema`": JsonSchemaFormat,
    "`structured_outputs`": StructuredOutputs,
    "`/v1/chat/completions`": ChatRequest,
    "`messages`": Message,
    "`tools[].function`": FunctionDefinition,
    "`prediction`": Prediction,
    "`/v1/completions`": CompletionRequest,
    "`/v1/responses`": ResponsesRequest,
    "`text.format`": TextFormat,
    "`/tokenize`": TokenizeRequest,
    "`/detokenize`": DetokenizeRequest,
}
_HEAD = """\
# Fields of the OpenAI API

Generated from the schema by `make generate`. [openai.md](openai.md)
explains how the service uses the fields, [sampling.md](sampling.md) the sampling parameters.
`/v1/chat/completions` and `/v1/completions` have the fields of the first section and their own.
"""


def page() -> str:
    """Generate the page."""
    return "\n".join([_HEAD, *_sections()]).rstrip() + "\n"


def own_fields(model: type[RequestModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their names in requests, without inherited ones."""
    inherits = issubclass(model, SamplingFields) and model is not SamplingFields
    shared = SamplingFields.model_fields if inherits else {}
    fields = model.model_fields.items()
    return {field.alias or name: field for name, field in fields if name not in shared}


def _sections() -> Iterator[str]:
    for heading, model in SECTIONS.items():
        yield f"## {heading}\n"
        fields = own_fields(model).items()
        rows = [f"| `{name}` | {_limits(field)} | {field.description} |" for name, field in fields]
        yield "\n".join(["| field | limits | meaning |", "|---|---|---|", *rows]) + "\n"
        refused = [f"| `{name}` | {why} |" for name, why in _own_refused(model).items()]
        if refused:
            yield "\n".join(["| refused | it must be |", "|---|---|", *refused]) + "\n"


def _own_refused(model: type[RequestModel]) -> dict[str, str]:
    shared = SamplingFields.refused if model is not SamplingFields else {}
    return {name: why for name, why in model.refused.items() if name not in shared}


def _limits(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    extra = extra if isinstance(extra, dict) else {}
    low, high = extra.get("minimum"), extra.get("maximum")
    if low is None:
        return ", ".join(_literals(field.annotation))
    return f"{low} or more" if high is None else f"{low} to {high}"


def _literals(annotation: Any) -> list[str]:
    """Return the values of a field of literals."""
    if get_origin(annotation) is Literal:
        return [f"`{each}`" for each in get_args(annotation) if isinstance(each, str)]
    return [each for part in get_args(annotation) for each in _literals(part)]


def main(arguments: list[str]) -> int:
    """Generate or check the page; return the exit status."""
    return run({PAGE: page}, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
