"""The prompts of the benchmarks, as token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.tokenizer import ChatMessage, Tokenizer

DEFAULT_PATH = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class BenchmarkPrompt:
    """The first user turn of a benchmark question, in the model's chat template."""

    prompt_id: str
    suite: str
    token_ids: tuple[int, ...]


def load_prompts(path: Path, tokenizer: Tokenizer, closing: str = "") -> list[BenchmarkPrompt]:
    """Reads a JSON lines file whose objects have `id`, `suite` and `turns`, in its order.

    `closing` is put behind each turn, to ask nearly the same.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_encode(json.loads(line), tokenizer, closing) for line in lines if line.strip()]


def _encode(record: dict[str, Any], tokenizer: Tokenizer, closing: str) -> BenchmarkPrompt:
    token_ids = tokenizer.encode_chat([ChatMessage("user", record["turns"][0] + closing)])
    return BenchmarkPrompt(record["id"], record["suite"], tuple(token_ids))
