"""The `specdec` command: serve a model, ask it, talk with it, steer it, fetch models.

Answers go to stdout, everything else to stderr. Whatever takes long to import is imported where it
is used, so that `specdec generate` starts at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from cluster.cli import admin
from cluster.cli.bench.cli import bench
from cluster.cli.chat import chat
from cluster.cli.completion import completion
from cluster.cli.completion_result import chunk_as_json, receive
from cluster.cli.connection_options import client_flags
from cluster.cli.doctor import doctor
from cluster.cli.errors import OneLineErrors
from cluster.cli.help import SectionedCommand
from cluster.cli.models import models
from cluster.cli.output import json_flag, lines_of, say, show_json
from cluster.cli.sampling_options import answer_flags, report_flags, sampling_params
from cluster.cli.serve import serve
from specdec.client import Client
from specdec.types.chat import ChatMessage
from specdec.types.responses import StreamChunk


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specdec", message="specdec %(version)s")
def main() -> None:
    """Serve LLMs with speculative decoding."""


@main.command("version")
@json_flag
def show_version(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        show_json({"version": version("specdec")})
        return
    click.echo(f"specdec {version('specdec')}")


@contextmanager
def _text_shown() -> Iterator[Callable[[StreamChunk], None]]:
    """Prints texts on one line, and ends that line even where the answer breaks off."""
    begun = False

    def show(chunk: StreamChunk) -> None:
        nonlocal begun
        begun = True
        click.echo(chunk.text, nl=False)

    try:
        yield show
    finally:
        if begun:
            click.echo()


def _show_json(chunk: StreamChunk) -> None:
    show_json(chunk_as_json(chunk))


def _show_nothing(chunk: StreamChunk) -> None:
    """Leaves it all to the end."""


def _prompt(text: str, system: str | None, raw: bool) -> str | list[ChatMessage]:
    if raw and system is not None:
        raise click.UsageError("--system has no place in a --raw prompt")
    if text == "-":
        # Bytes that are no UTF-8 are kept as they are on a command line, for the client to refuse.
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    if raw:
        return text
    instructions = [] if system is None else [ChatMessage("system", system)]
    return [*instructions, ChatMessage("user", text)]


@main.command(cls=SectionedCommand, short_help="Complete a prompt with the model that is served.")
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Send PROMPT as it is, not as a user's chat message.")
@click.option("--system", help="System message to put before PROMPT.")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Show the answer as it comes. Default: on a terminal, unless --json or several choices.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object; with --stream a line for each chunk, then one with the rest.",
)
@client_flags
@answer_flags
@report_flags
def generate(
    prompt: str,
    raw: bool,
    system: str | None,
    stream: bool | None,
    as_json: bool,
    address: str,
    tls_ca_file: Path | None,
    api_key: str | None,
    timeout_s: float,
    **sampling: Any,
) -> None:
    """Complete PROMPT ("-": standard input) with the model that is served."""
    content, params = _prompt(prompt, system, raw), sampling_params(**sampling)
    if stream is None:
        stream = not as_json and params.n == 1 and sys.stdout.isatty()
    if stream and not as_json and params.n > 1:
        raise click.UsageError("several choices come all at once; --stream shows them with --json")
    shown = _text_shown() if stream else nullcontext(_show_nothing)
    if stream and as_json:
        shown = nullcontext(_show_json)
    with (
        Client(address, timeout_s=timeout_s, tls_ca_file=tls_ca_file, api_key=api_key) as client,
        shown as show,
    ):
        answer = receive(client.generate_stream(content, params), show)
    if as_json:
        show_json(answer.outcome if stream else answer.content | answer.outcome)
        return
    for line in lines_of(answer, with_text=not stream):
        click.echo(line)
    say(answer.summary)


@main.command(short_help="Show the tokens of a text.")
@click.argument("text")
@click.option("--chat", "as_chat", is_flag=True, help="As a user's message, in the chat template.")
@json_flag
@client_flags
def tokenize(
    text: str,
    as_chat: bool,
    as_json: bool,
    address: str,
    tls_ca_file: Path | None,
    api_key: str | None,
) -> None:
    """Show the tokens of TEXT ("-": standard input), exactly as of a prompt, and how many."""
    with Client(address, tls_ca_file=tls_ca_file, api_key=api_key) as client:
        read = client.tokenize(_prompt(text, None, not as_chat))
    if as_json:
        show_json(asdict(read))
        return
    for token_id, token in zip(read.token_ids, read.tokens, strict=True):
        click.echo(f"{token_id}\t{token}")
    say(f"{len(read.token_ids)} tokens; prompt and answer may have {read.max_model_len}")


main.add_command(serve)
main.add_command(bench)
main.add_command(chat)
main.add_command(doctor)
main.add_command(admin.status)
main.add_command(admin.speculation)
main.add_command(admin.profile)
main.add_command(models)
main.add_command(completion)
