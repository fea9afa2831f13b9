"""Output and help of the commands.

Results go to stdout, messages and progress to stderr. The help groups many flags into sections.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import click

_WIDTH = 100
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but the tab and the line feed."""
_Command = TypeVar("_Command", bound=Callable[..., Any])
Flag = Callable[[Any], Any]
"""A decorator that adds a flag to a command."""

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
_COUNTER = "{n_fmt}{unit} [{elapsed}, {rate_noinv_fmt}{postfix}]"
"""Formats in which a rate below 1 is per second too; tqdm would invert it."""

default_flag = partial(click.option, show_default=True)
"""A flag of which the help shows the default."""

json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" and "2 tokens"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def print_stderr(line: str) -> None:
    """Print a message to stderr; stdout is reserved for results."""
    click.echo(line, err=True)


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(record.getMessage())


@contextmanager
def warnings_on_stderr(logger_name: str) -> Iterator[None]:
    """Print the warnings of a logger to stderr, in one line each."""
    logger, handler = logging.getLogger(logger_name), _StderrHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def show_text(text: str, *, nl: bool = True) -> None:
    """Print generated text; on a terminal, with control characters as visible escapes.

    A prompt or a model can have sequences generated that change the clipboard or the screen.
    """
    if sys.stdout.isatty():
        text = _CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)
    click.echo(text, nl=nl)


def show_json(value: dict[str, Any]) -> None:
    """Print one line of JSON, with all control characters as escapes."""
    line = json.dumps(value, ensure_ascii=False)  # escapes those below a space only
    click.echo(_CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", line))


def show_result(fields: dict[str, Any], text: object, as_json: bool) -> None:
    """Print the result of a command: its fields as JSON, or a text."""
    if as_json:
        show_json(fields)
    else:
        click.echo(text)


@contextmanager
def progress_bar(total: int | None, unit: str, what: str = "") -> Iterator[Callable[[], None]]:
    """Show a progress bar if stderr is a terminal; yield the function that advances it.

    total: None if it is not known. The function is thread-safe.
    """
    from tqdm import tqdm

    form = ("{desc}: " * bool(what) + _COUNTER) if total is None else _BAR
    names: dict[str, Any] = {"unit": f" {unit}s", "desc": what or None, "bar_format": form}
    with tqdm(total=total, leave=False, disable=not sys.stderr.isatty(), **names) as bar:

        def advance() -> None:
            bar.update()

        yield advance


class SectionedOption(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, *arguments: Any, section: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section


def section_flag(section: str, *names: str, **attributes: Any) -> Flag:
    """Return a flag in a section of the help; the arguments are those of `click.option`."""
    return click.option(*names, cls=SectionedOption, section=section, **attributes)


def combine_flags(*flags: Flag) -> Callable[[_Command], _Command]:
    """Return a decorator that adds several flags to a command, in this order."""

    def add(command: _Command) -> _Command:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return add


class SectionedCommand(click.Command):
    """A command whose help groups the options into sections."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.context_settings.setdefault("max_content_width", _WIDTH)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the help records of the options by section, in the order of the options."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section with its options."""
        for heading, records in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)
