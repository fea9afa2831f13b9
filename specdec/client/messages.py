"""What goes into a call and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.finish_reason import FinishReason
from specdec.stats import SpeculationStats
from specdec.tokenizer import ChatMessage

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""A text, token ids that are used as they are, or the turns of a conversation."""


@dataclass(frozen=True)
class Usage:
    """What a request took, in tokens, and what speculation did for it."""

    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats


@dataclass(frozen=True)
class StreamChunk:
    """What one decoding step added.

    text: whole characters; may lag behind token_ids until the last chunk.
    finish_reason, usage: in the last chunk only. seed: in the first and the last.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    seed: int | None
    usage: Usage | None


@dataclass(frozen=True)
class Completion:
    """A whole answer. The same prompt, parameters and seed give the same one again."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    usage: Usage


@dataclass(frozen=True)
class TokenizedInput:
    """An input's token ids and, one for one, their spelling in the vocabulary.

    max_model_len: most tokens that a prompt and its completion may have together.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True)
class ModelInfo:
    """The model that is loaded.

    max_model_len: most tokens of a prompt and its completion together.
    speculation_method: None where nothing drafts, and then num_speculative_tokens is 0.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    tensor_parallel_size: int
    speculation_method: str | None
    num_speculative_tokens: int
    version: str
