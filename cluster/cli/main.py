"""The `specdec` command.

Results go to stdout, everything else to stderr. Modules that are slow to import are imported where
they are used, so that `specdec generate` starts fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import click
from click.shell_completion import get_completion_class

from cluster.cli import admin
from cluster.cli.adapt import adapt
from cluster.cli.bench.cli import bench
from cluster.cli.chat import chat
from cluster.cli.completion_result import chunk_as_json, receive, result_lines
from cluster.cli.doctor import doctor
from cluster.cli.drafter import drafter
from cluster.cli.errors import OneLineErrors
from cluster.cli.eval_drafter import eval_drafter
from cluster.cli.lora import lora
from cluster.cli.models import models
from cluster.cli.options import (
    client_flags,
    output_flags,
    pop_connection,
    sampling_flags,
    sampling_params,
)
from cluster.cli.output import SectionedCommand, json_flag, print_stderr, show_json, show_text
from cluster.cli.serve import serve
from cluster.cli.train import train
from cluster.cli.train_data import train_data
from specdec.client import Client
from specdec.types.request import ChatMessage
from specdec.types.responses import StreamChunk

_SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_SPECDEC_COMPLETE"
"""The environment variable through which the script asks click for completions."""

_COMPLETION_HELP = """Generate the completion script for SHELL: bash, zsh or fish.

The script completes commands, flags and their values. To load it in every session:

\b
bash   eval "$(specdec completion bash)"      in ~/.bashrc
zsh    eval "$(specdec completion zsh)"       in ~/.zshrc
fish   specdec completion fish | source       in ~/.config/fish/config.fish
"""


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specdec", message="specdec %(version)s")
def main() -> None:
    """Serve large language models with speculative decoding."""


@main.command("version")
@json_flag
def show_version(as_json: bool) -> None:
    """Show the version."""
    if as_json:
        show_json({"version": version("specdec")})
        return
    click.echo(f"specdec {version('specdec')}")


@contextmanager
def _stream_text() -> Iterator[Callable[[StreamChunk], None]]:
    """Yield a function that prints texts on one line; end the line even after an error."""
    has_output = False

    def show(chunk: StreamChunk) -> None:
        nonlocal has_output
        has_output = True
        show_text(chunk.text, nl=False)

    try:
        yield show
    finally:
        if has_output:
            click.echo()


def _show_json(chunk: StreamChunk) -> None:
    show_json(chunk_as_json(chunk))


def _show_nothing(chunk: StreamChunk) -> None:
    """Print nothing until the completion is finished."""


def _prompt(text: str, system: str | None, raw: bool) -> str | list[ChatMessage]:
    if raw and system is not None:
        raise click.UsageError("--system cannot be used with --raw")
    if text == "-":
        # Invalid UTF-8 becomes surrogates, as in command line arguments; the client rejects them.
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    if raw:
        return text
    instructions = [] if system is None else [ChatMessage("system", system)]
    return [*instructions, ChatMessage("user", text)]


@main.command(cls=SectionedCommand, short_help="Generate a completion for a prompt.")
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Send PROMPT without applying the chat template.")
@click.option("--system", help="System message to send before PROMPT.")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Stream the output. Default: if stdout is a terminal, without --json and with n = 1.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object; with --stream one object per chunk, then one with the statistics.",
)
@client_flags
@sampling_flags
@output_flags
def generate(
    prompt: str, raw: bool, system: str | None, stream: bool | None, as_json: bool, **flags: Any
) -> None:
    """Generate a completion for PROMPT with the served model; - reads the prompt from stdin."""
    connection = pop_connection(flags)
    content, params = _prompt(prompt, system, raw), sampling_params(**flags)
    if stream is None:
        stream = not as_json and params.n == 1 and sys.stdout.isatty()
    if stream and not as_json and params.n > 1:
        raise click.UsageError("--stream needs --json if n is greater than 1")
    output = _stream_text() if stream else nullcontext(_show_nothing)
    if stream and as_json:
        output = nullcontext(_show_json)
    with Client(**connection) as client, output as show:
        result = receive(client.generate_stream(content, params), show)
    if as_json:
        show_json(result.outcome if stream else result.content | result.outcome)
        return
    for line in result_lines(result, with_text=not stream):
        show_text(line)
    print_stderr(result.summary)


@main.command(short_help="Tokenize a text.")
@click.argument("text")
@click.option(
    "--chat", "as_chat", is_flag=True, help="Apply the chat template to TEXT as a user message."
)
@json_flag
@client_flags
def tokenize(text: str, as_chat: bool, as_json: bool, **connection: Any) -> None:
    """Show the tokens of TEXT as the service tokenizes a prompt; - reads TEXT from stdin."""
    with Client(**connection) as client:
        result = client.tokenize(_prompt(text, None, not as_chat))
    if as_json:
        show_json(asdict(result))
        return
    for token_id, token in zip(result.token_ids, result.tokens, strict=True):
        click.echo(f"{token_id}\t{token}")
    print_stderr(f"{len(result.token_ids)} tokens (max_model_len is {result.max_model_len})")


@main.command(help=_COMPLETION_HELP, short_help="Generate a shell completion script.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    root = ctx.find_root().command
    click.echo(kind(root, {}, "specdec", COMPLETE_VARIABLE).source())


main.add_command(serve)
main.add_command(bench)
main.add_command(chat)
main.add_command(doctor)
main.add_command(eval_drafter)
main.add_command(train_data)
main.add_command(admin.status)
main.add_command(admin.speculation)
main.add_command(admin.profile)
main.add_command(drafter)
main.add_command(lora)
main.add_command(adapt)
main.add_command(models)
main.add_command(train)
