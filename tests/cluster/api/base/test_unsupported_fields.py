# Modules: cluster.api.base.unsupported_fields
"""Unsupported fields: a neutral value counts as left out, any other is rejected by name."""

import pytest
from pydantic import ValidationError

from cluster.api.anthropic.schema import MessagesRequest
from cluster.api.base.openai_schema import RequestModel, StreamOptions
from cluster.api.base.unsupported_fields import _NEUTRAL, is_neutral
from cluster.api.openai.schemas.chat_schema import ChatRequest, Message
from cluster.api.openai.schemas.completion_schema import CompletionRequest
from cluster.api.openai.schemas.output_format import StructuredOutputs
from cluster.api.openai.schemas.responses_schema import ResponsesRequest, TextOptions
from cluster.api.sglang.schema import GenerateRequest, SglSamplingParams

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    ChatRequest: {"messages": USER},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": USER, "max_tokens": 2},
    GenerateRequest: {"text": "hi"},
    SglSamplingParams: {},
    StreamOptions: {},
    StructuredOutputs: {},
    TextOptions: {},
    Message: USER[0],
}


def models(kind=RequestModel):
    return [each for below in kind.__subclasses__() for each in (below, *models(below))]


SENT = [
    (CompletionRequest, {"best_of": 1, "suffix": "", "tools": []}),  # OpenAI's defaults
    (CompletionRequest, {"use_beam_search": False, "length_penalty": 1.0}),  # vLLM's
    (CompletionRequest, {"no_stop_trim": False, "return_hidden_states": False}),  # SGLang's
    (ChatRequest, {"modalities": ["text"], "functions": []}),
    (ChatRequest, {"guided_decoding_backend": "guidance", "add_special_tokens": False}),
    (ChatRequest, {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True}),
    (ChatRequest, {"spaces_between_special_tokens": True, "length_penalty": 1}),
    (ResponsesRequest, {"background": False, "text": {"verbosity": "medium"}}),
    (ResponsesRequest, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "stop": []}),
    (ResponsesRequest, {"stream_options": {"include_usage": True}, "stream": True}),  # AIPerf's
    (ResponsesRequest, {"vllm_xargs": {}, "mm_processor_kwargs": {}}),
    (MessagesRequest, {"mcp_servers": []}),
    (GenerateRequest, {"log_metrics": True, "return_routed_experts": False, "background": False}),
    (GenerateRequest, {"return_indexer_topk": False, "no_logs": False, "return_bytes": False}),
    (SglSamplingParams, {"beam_width": 1, "custom_params": {}, "stop_regex": []}),
    (SglSamplingParams, {"stop_regex": ""}),
    (ChatRequest, {"truncation_side": "left", "stop_regex": ""}),
    (CompletionRequest, {"truncation_side": "left", "stop_regex": []}),
    (StreamOptions, {"include_obfuscation": False}),
    (StructuredOutputs, {"regex": "a", "disable_fallback": True, "whitespace_pattern": ""}),
]


@pytest.mark.parametrize(("model", "fields"), SENT)
def test_a_neutral_value_counts_as_left_out(model, fields):
    given = model.model_validate({**BODIES[model], **fields})
    known = {name: value for name, value in fields.items() if name not in model.refused}
    left_out = model.model_validate({**BODIES[model], **known})
    assert given == left_out
    assert given.model_fields_set == left_out.model_fields_set


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (CompletionRequest, "best_of", 2),
        (CompletionRequest, "best_of", True),  # equal to 1, and no number
        (ChatRequest, "modalities", ["text", "audio"]),
        (ChatRequest, "separate_reasoning", "no"),
        (ChatRequest, "web_search_options", {}),  # how OpenAI's example requests a search
        (ChatRequest, "guided_decoding_backend", "xgrammar"),
        (ResponsesRequest, "background", True),
        (ResponsesRequest, "stream_options", {"continuous_usage_stats": True}),
        (ResponsesRequest, "previous_response", {"id": "resp_1"}),
        (GenerateRequest, "log_metrics", 0),
        (GenerateRequest, "return_hidden_states", True),
        (ChatRequest, "unknown_field", False),  # neutral values are of known fields alone
    ],
)
def test_another_value_is_rejected(model, name, value):
    with pytest.raises(ValidationError, match=name):
        model.model_validate({**BODIES[model], name: value})


def test_every_neutral_value_belongs_to_an_unsupported_field():
    refused = {name for model in models() for name in model.refused}
    assert _NEUTRAL.keys() <= refused
    for model in models():
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert not fields & model.refused.keys(), f"{model.__name__}: supported and refused"


@pytest.mark.parametrize("value", [False, "", [], {}])
def test_an_empty_value_is_neutral_in_every_field(value):
    assert is_neutral("any", value)
    assert not is_neutral("any", [value])
    assert not is_neutral("any", 0)
