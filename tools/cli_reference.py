"""Writes docs/cli-reference.md: every command with its flags, and what becomes of vLLM's.

python -m tools.cli_reference [check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from cluster.cli.output import SectionedCommand
from cluster.cli.main import main as specdec
from cluster.config.vllm_compat import ALWAYS, RENAMED, SAME
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.config.vllm_compat import VALUES
from tools.made_files import run

PAGE = Path("docs/cli-reference.md")
_HEAD = """\
# Commands and flags

Made from the commands by `make cli-reference`; `--help` shows the same. Use: [cli.md](cli.md).
"""
_VLLM = """\
## Flags of `vllm serve`

The same names work in a file for `--config`, with underscores or dashes.
"""


def reference() -> str:
    """The page."""
    return "\n".join([_HEAD, *_command("specdec", specdec), _VLLM, *_vllm()]).rstrip() + "\n"


def _command(path: str, command: click.Command) -> Iterator[str]:
    """The command, and then those within it."""
    context = click.Context(command, info_name=path)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, "a group has the commands that it lists"
            yield from _command(f"{path} {name}", found)
        return
    words = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## `{path}`\n"
    yield f"```\n{words}\n```\n"
    yield _prose(command.help or "") + "\n"
    for heading, records in _sections(command, context).items():
        shown = [each for each in records if "--help" not in each[0]]
        if shown:
            yield _table(heading, "meaning", {f"`{flag}`": text for flag, text in shown})


def _sections(
    command: click.Command, context: click.Context
) -> Mapping[str, list[tuple[str, str]]]:
    if isinstance(command, SectionedCommand):
        return command.sections(context)
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    return {"Options": [found for each in options if (found := each.get_help_record(context))]}


def _prose(text: str) -> str:
    """Paragraphs on a line each; what click is told not to wrap stays as it is."""
    paragraphs = [each.strip("\n") for each in text.split("\n\n")]
    return "\n\n".join(
        f"```\n{each.removeprefix(chr(8)).strip()}\n```"
        if each.startswith("\b")
        else " ".join(each.split())
        for each in paragraphs
    )


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {first} | {second} |", "|---|---|"]
    for name, text in rows.items():
        lines.append(f"| {_cell(name)} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _vllm() -> Iterator[str]:
    yield f"Of the same name and meaning: {', '.join(map(_flag, SAME))}.\n"
    renamed = {_flag(name): _flag(ours) for name, ours in RENAMED.items()}
    yield _table("another name here", "which", renamed)
    keys = {_flag(name): f"`{key}`" for name, key in SPECULATION_KEYS.items()}
    yield _table("stands in `--speculative-config`", "as key", keys)
    values = {
        f"{_flag(name)} `{theirs}`": f"`{ours}`"
        for name, words in VALUES.items()
        for theirs, ours in words.items()
    }
    yield _table("value of another name", "here", values)
    always = {
        _flag(name): f"{_value(each.value)}: {each.reason}" for name, each in sorted(ALWAYS.items())
    }
    yield _table("may have one value, which is so anyway", "value", always)


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _value(value: bool | int | str) -> str:
    return f"`{str(value).lower()}`"


def main(arguments: list[str]) -> int:
    """Exit status 1 where the page is not as it would be made."""
    return run({PAGE: reference}, "make cli-reference", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
