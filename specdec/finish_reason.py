"""Why a generation ended."""

from __future__ import annotations

from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
