"""What the interfaces ask of a Router, whichever protocol it came by."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.sampling_params import SamplingParams, SpeculationMethod
from specdec.tokenizer import ChatMessage

Chat = tuple[ChatMessage, ...]
Prompt = str | tuple[int, ...] | Chat
"""A text, token ids that are used as they are, or a conversation."""


@dataclass(frozen=True)
class GenerateCall:
    """A completion that is asked for. Empty `model`: the loaded one. Empty `request_id`: any."""

    model: str
    prompt: Prompt
    params: SamplingParams
    request_id: str


@dataclass(frozen=True)
class TokenizeCall:
    """An encoding that is asked for; `add_special_tokens` concerns texts only."""

    model: str
    prompt: str | Chat
    add_special_tokens: bool


@dataclass(frozen=True)
class DetokenizeCall:
    """A text that is asked for."""

    model: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """The model and how it is served.

    max_model_len: most tokens of a prompt and its completion together.
    speculation_method: None where nothing drafts, and then num_speculative_tokens is 0.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    tensor_parallel_size: int
    speculation_method: SpeculationMethod | None
    num_speculative_tokens: int
    version: str
