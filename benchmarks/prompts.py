"""Prompts of the benchmarks, as token ids."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage

DEFAULT_PATH = Path(__file__).with_name("prompts.jsonl")
SUITES = ("edit", "humaneval", "gsm8k", "mt_bench")

_TYPICAL_TOKENS = 70

_OF_MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
"""Categories of Spec-Bench's first suite; the others are suites of their own."""


@dataclass(frozen=True)
class BenchmarkPrompt:
    """First user turn of a benchmark question, in the model's chat template."""

    prompt_id: str
    suite: str
    token_ids: tuple[int, ...]


def add_prompts_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--prompts`."""
    parser.add_argument(
        "--prompts",
        type=Path,
        default=DEFAULT_PATH,
        help="JSON lines file, or question.jsonl of Spec-Bench",
    )


def load_prompts(path: Path, tokenizer: Tokenizer, closing: str = "") -> list[BenchmarkPrompt]:
    """Read a JSON lines file of objects with `id`, `suite` and `turns`, in file order.

    Or the questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851). `closing` is appended to
    each turn, to create a similar prompt.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_encode(json.loads(line), tokenizer, closing) for line in lines if line.strip()]


def of_similar_length(prompts: Sequence[BenchmarkPrompt], count: int) -> list[tuple[int, ...]]:
    """Return the `count` prompts whose length is nearest to 70 tokens."""
    by_distance = sorted(prompts, key=lambda prompt: abs(len(prompt.token_ids) - _TYPICAL_TOKENS))
    return [prompt.token_ids for prompt in by_distance[:count]]


def by_suite(
    prompts: Sequence[BenchmarkPrompt], suites: Sequence[str], num_each: int
) -> dict[str, list[tuple[int, ...]]]:
    """Return prompts at equal distances in each suite. Raises InvalidValueError for an empty one.

    Spec-Bench's first suite is sorted by category.
    """
    found = dict[str, list[tuple[int, ...]]]()
    for suite in suites:
        own = [each.token_ids for each in prompts if each.suite == suite]
        count = min(num_each, len(own))
        found[suite] = [own[index * len(own) // count] for index in range(count)]
    for suite, own in found.items():
        if not own:
            known = sorted({prompt.suite for prompt in prompts})
            raise InvalidValueError("suites", suite, f"one of {', '.join(known)}")
    return found


def _encode(record: dict[str, Any], tokenizer: Tokenizer, closing: str) -> BenchmarkPrompt:
    token_ids = tokenizer.encode_chat([ChatMessage("user", record["turns"][0] + closing)])
    if "question_id" in record:
        suite = "mt_bench" if record["category"] in _OF_MT_BENCH else record["category"]
        return BenchmarkPrompt(str(record["question_id"]), suite, tuple(token_ids))
    return BenchmarkPrompt(record["id"], record["suite"], tuple(token_ids))
