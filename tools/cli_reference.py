"""Generate docs/cli-reference.md: every command with its flags.

python -m tools.cli_reference [check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from cluster.cli.main import main as specdec
from cluster.cli.output import SectionedCommand
from tools.generated_files import run

PAGE = Path("docs/cli-reference.md")
_HEAD = """\
# Commands and flags

Generated from the commands by `make generate`; `--help` shows the same text. For examples see
[cli.md](cli.md), for the flags of other engines [migration.md](migration.md).
"""


def reference() -> str:
    """Generate the page."""
    return "\n".join([_HEAD, *_command("specdec", specdec)]).rstrip() + "\n"


def _command(path: str, command: click.Command) -> Iterator[str]:
    """Yield the sections of a command, or of all commands in a group."""
    context = click.Context(command, info_name=path)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None, "a group contains the commands that it lists"
            yield from _command(f"{path} {name}", subcommand)
        return
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## `{path}`\n"
    yield f"```\n{usage}\n```\n"
    yield _prose(command.help or "") + "\n"
    for heading, records in _sections(command, context).items():
        rows = {f"`{flag}`": text for flag, text in records if "--help" not in flag}
        if rows:
            yield _table(heading, "description", rows)


def _sections(
    command: click.Command, context: click.Context
) -> Mapping[str, list[tuple[str, str]]]:
    if isinstance(command, SectionedCommand):
        return command.sections(context)
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = [option.get_help_record(context) for option in options]
    return {"Options": [record for record in records if record]}


def _prose(text: str) -> str:
    """Join the lines of each paragraph; paragraphs that click does not wrap become code blocks."""
    paragraphs = [paragraph.strip("\n") for paragraph in text.split("\n\n")]
    return "\n\n".join(
        f"```\n{paragraph.removeprefix(chr(8)).strip()}\n```"
        if paragraph.startswith("\b")
        else " ".join(paragraph.split())
        for paragraph in paragraphs
    )


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {first} | {second} |", "|---|---|"]
    for name, text in rows.items():
        lines.append(f"| {_cell(name)} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text in one line. Escape click's ranges, which the site would take for references."""
    return " ".join(text.split()).replace("|", "\\|").replace(" [x", " \\[x")


def main(arguments: list[str]) -> int:
    """Generate or check the page; return the exit status."""
    return run({PAGE: reference}, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
