# Modules: cluster.api.anthropic.schema, cluster.api.openai.schemas.chat_schema
"""Every field that the official clients can send is accepted, or refused with the reason."""

import importlib
from inspect import signature
from typing import get_type_hints

import pytest

from cluster.api.anthropic import schema as messages
from cluster.api.base.openai_schema import StreamOptions
from cluster.api.openai.schemas import chat_schema as chat
from cluster.api.openai.schemas import response_items as items
from cluster.api.openai.schemas import responses_schema as responses
from cluster.api.openai.schemas.completion_schema import CompletionRequest
from cluster.api.openai.schemas.output_format import ResponseFormat

OPTIONS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
HEADERS = {"betas", "user_profile_id", "workspace_id"}
REQUESTS = {
    "openai.resources.chat.completions.Completions.create": chat.ChatRequest,
    "openai.resources.completions.Completions.create": CompletionRequest,
    "openai.resources.responses.Responses.create": responses.ResponsesRequest,
    "anthropic.resources.messages.Messages.create": messages.MessagesRequest,
    "anthropic.resources.messages.Messages.count_tokens": messages.CountTokensRequest,
    "anthropic.resources.beta.messages.Messages.create": messages.MessagesRequest,
    "anthropic.resources.beta.messages.Messages.count_tokens": messages.CountTokensRequest,
}
PARTS = {
    "openai.types.chat.ChatCompletionContentPartTextParam": chat.ContentPart,
    "openai.types.chat.ChatCompletionAssistantMessageParam": chat.Message,
    "openai.types.chat.ChatCompletionToolMessageParam": chat.Message,
    "openai.types.chat.ChatCompletionUserMessageParam": chat.Message,
    "openai.types.chat.ChatCompletionMessageFunctionToolCallParam": chat.ToolCall,
    "openai.types.chat.ChatCompletionFunctionToolParam": chat.ToolDefinition,
    "openai.types.chat.ChatCompletionStreamOptionsParam": StreamOptions,
    "openai.types.shared_params.FunctionDefinition": chat.FunctionDefinition,
    "openai.types.shared_params.ResponseFormatJSONSchema": ResponseFormat,
    "openai.types.shared_params.Reasoning": responses.ReasoningOptions,
    "openai.types.responses.ResponseTextConfigParam": responses.TextOptions,
    "openai.types.responses.ResponseInputTextParam": items.InputPart,
    "openai.types.responses.EasyInputMessageParam": items.InputMessage,
    "openai.types.responses.ResponseOutputMessageParam": items.InputMessage,
    "openai.types.responses.ResponseReasoningItemParam": items.ReasoningItem,
    "openai.types.responses.ResponseFunctionToolCallParam": items.FunctionCall,
    "openai.types.responses.FunctionToolParam": items.FunctionTool,
    "openai.types.responses.CustomToolParam": items.CustomTool,
    "anthropic.types.beta.BetaTextBlockParam": messages.TextBlock,
    "anthropic.types.beta.BetaThinkingBlockParam": messages.ThinkingBlock,
    "anthropic.types.beta.BetaToolUseBlockParam": messages.ToolUseBlock,
    "anthropic.types.beta.BetaToolResultBlockParam": messages.ToolResultBlock,
    "anthropic.types.beta.BetaImageBlockParam": messages.MediaBlock,
    "anthropic.types.beta.BetaToolParam": messages.ToolParam,
    "anthropic.types.beta.BetaToolChoiceToolParam": messages.ToolChoice,
    "anthropic.types.beta.BetaThinkingConfigEnabledParam": messages.Thinking,
    "anthropic.types.beta.BetaOutputConfigParam": messages.OutputConfig,
    "anthropic.types.beta.BetaContextManagementConfigParam": messages.ContextManagement,
}


def unknown(names, model):
    fields = {field.alias or name for name, field in model.model_fields.items()}
    return set(names) - fields - model.refused.keys()


def found(path):
    """Return what has this name; each import of a client takes 2 s, so it is not at the top."""
    names = path.split(".")
    split = next(index for index, name in enumerate(names) if name[0].isupper())
    value = importlib.import_module(".".join(names[:split]))
    for name in names[split:]:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", REQUESTS)
def test_each_parameter_of_a_client_is_known(path):
    names = signature(found(path)).parameters.keys() - OPTIONS - HEADERS
    assert not unknown(names, REQUESTS[path])


@pytest.mark.parametrize("path", PARTS)
def test_each_field_of_a_part_is_known(path):
    assert not unknown(get_type_hints(found(path)), PARTS[path])


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "scale", "priority", "fast"])
def test_each_tier_is_accepted(tier):
    turns = [{"role": "user", "content": "a"}]
    assert chat.ChatRequest(messages=turns, service_tier=tier).service_tier == tier
    assert responses.ResponsesRequest(input="a", service_tier=tier).service_tier == tier


def test_what_the_service_cannot_do_is_refused_by_name():
    turns = [{"role": "user", "content": "a"}]
    given = {"messages": turns, "max_tokens": 1}
    assert messages.MessagesRequest(**given, inference_geo="global", fallbacks="default")
    for field, value in (("inference_geo", "us"), ("thread", {"type": "create"})):
        with pytest.raises(ValueError, match=field):
            messages.MessagesRequest(**given, **{field: value})
