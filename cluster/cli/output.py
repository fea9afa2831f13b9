"""Output of the commands: results as text or JSON on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from cluster.cli.completion_result import CompletionResult
from specdec.types.responses import Choice, PositionLogprobs, TokenLogprob

json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_stderr(line: str) -> None:
    """Print a message to stderr; stdout is reserved for results."""
    click.echo(line, err=True)


def show_json(value: dict[str, Any]) -> None:
    """Print one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def progress_bar(total: int | None, unit: str, what: str = "") -> Iterator[Callable[[], None]]:
    """Show a progress bar if stderr is a terminal; yield the function that advances it.

    total: None if it is not known. The function is thread-safe.
    """
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, desc=what or None, leave=False, disable=hidden) as bar:

        def advance() -> None:
            bar.update()

        yield advance


def result_lines(result: CompletionResult, *, with_text: bool) -> Iterator[str]:
    """Yield the lines of a result: texts, with headings if there are several, and logprobs.

    with_text: False if the text was streamed already.
    """
    for choice in result.choices:
        if len(result.choices) > 1:
            yield _heading(choice)
        if with_text:
            yield choice.text
        if choice.logprobs is not None:
            yield from _table("output", choice.logprobs)
    if result.prompt_logprobs is not None:
        yield from _table("prompt", result.prompt_logprobs)


def _heading(choice: Choice) -> str:
    at = "" if choice.stop_reason is None else f" at {_quoted(choice.stop_reason)}"
    return f"--- choice {choice.index}, {choice.finish_reason.value}{at}"


def _table(name: str, positions: Sequence[PositionLogprobs]) -> Iterator[str]:
    """Yield a line per token: its log probability, its rank and the most likely tokens."""
    yield f"{name + ' token':<20}{'logprob':>9}{'rank':>7}  best"
    for position in positions:
        chosen = position.chosen
        best = "  ".join(f"{_quoted(each.token)} {_number(each)}" for each in position.best)
        row = f"{_quoted(chosen.token):<20}{_number(chosen):>9}{position.rank:>7}  {best}"
        yield row.rstrip()


def _quoted(text: str | int) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number(token: TokenLogprob) -> str:
    return f"{token.logprob:.3f}"
