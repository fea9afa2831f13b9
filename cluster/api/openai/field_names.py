"""Names of fields in the API by their names in the engine, for error messages.

A field with several spellings has its newest one here; `sent_names` of a body has the one that the
client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COMPLETIONS: Mapping[str, str] = MappingProxyType(
    {
        "token_ids": "prompt",
        "structured_output": "structured_outputs",
        "structured_output.json_schema": "response_format.json_schema.schema",
        "structured_output.regex": "structured_outputs.regex",
        "structured_output.choice": "structured_outputs.choice",
        "structured_output.grammar": "structured_outputs.grammar",
    }
)

CHAT: Mapping[str, str] = MappingProxyType(
    {
        **COMPLETIONS,
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens",
        "prompt": "messages",
        "prompt length": "messages length",
    }
)

RESPONSES: Mapping[str, str] = MappingProxyType(
    {
        **CHAT,
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "messages length": "input length",
        "messages content length": "input length",
        "prompt": "input",
        "prompt length": "input length",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "structured_output.json_schema": "text.format.schema",
        "response_format.json_schema": "text.format.schema",
    }
)

TOKENS: Mapping[str, str] = MappingProxyType({"token_ids": "tokens", "text": "prompt"})

BY_PATH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETIONS,
        "/v1/responses": RESPONSES,
        "/tokenize": TOKENS,
        "/detokenize": TOKENS,
    }
)
"""The names by path of the endpoint."""
