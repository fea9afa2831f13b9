"""Names of formats of tool calls, and parsers of reasoning."""

from __future__ import annotations

from typing import Literal

ToolFormatName = Literal[
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "qwen3_coder",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "kimi_k2",
    "gpt_oss",
    "gemma4",
    "lfm2",
    "nemotron_json",
    "cohere_command3",
    "granite",
    "minimax_m2",
    "seed_oss",
]
ToolCallParserName = Literal["auto", ToolFormatName]
ReasoningParserName = Literal[
    "none", "deepseek_r1", "qwen3", "granite", "gpt_oss", "gemma4", "seed_oss"
]
