"""What commands print: answers for a reader, JSON for programs, and the rest on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from cluster.cli.completion_result import Answer
from specdec.types.responses import Choice, PositionLogprobs, TokenLogprob

_Command = TypeVar("_Command", bound=Callable[..., Any])


def json_flag(command: _Command) -> _Command:
    """Gives a command `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def say(line: str) -> None:
    """Tells whoever runs the command; standard output is for what was asked for."""
    click.echo(line, err=True)


def show_json(value: dict[str, Any]) -> None:
    """Prints one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def progress_bar(total: int | None, unit: str, what: str = "") -> Iterator[Callable[[], None]]:
    """Yields what to call at each thing done; shows them on a terminal, until all are done.

    total: None where it is not known. May be called by several threads.
    """
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, desc=what or None, leave=False, disable=hidden) as bar:

        def advance() -> None:
            bar.update()

        yield advance


def lines_of(answer: Answer, *, with_text: bool) -> Iterator[str]:
    """The lines to print: texts, under headings where there are several, and log-probabilities.

    with_text: False where a single text has been shown already.
    """
    for choice in answer.choices:
        if len(answer.choices) > 1:
            yield _heading(choice)
        if with_text:
            yield choice.text
        if choice.logprobs is not None:
            yield from _table("answer", choice.logprobs)
    if answer.prompt_logprobs is not None:
        yield from _table("prompt", answer.prompt_logprobs)


def _heading(choice: Choice) -> str:
    at = "" if choice.stop_reason is None else f" at {_quoted(choice.stop_reason)}"
    return f"--- choice {choice.index}, {choice.finish_reason.value}{at}"


def _table(name: str, positions: Sequence[PositionLogprobs]) -> Iterator[str]:
    """A line a token: its logarithm of probability, its rank, and the best ones."""
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
