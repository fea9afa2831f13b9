"""`specdec generate` and `specdec tokenize`: a prompt, sent to a running service."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.completion_result import chunk_as_json, receive, result_lines
from cluster.cli.options import (
    client_flags,
    output_flags,
    pop_connection,
    sampling_flags,
    sampling_params,
    served_model_flag,
)
from cluster.cli.output import (
    SectionedCommand,
    counted,
    json_flag,
    print_stderr,
    show_json,
    show_text,
)
from specdec.client import Client
from specdec.types.request import ChatMessage
from specdec.types.responses import StreamChunk

if TYPE_CHECKING:
    from specdec.types.reports.receipts import Receipt


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


def _writable(
    _context: click.Context, _parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Return a path of an option. Raise BadParameter if no file can be written there."""
    if path is None:
        return None
    # `Path.exists` raises for some paths; the final dot requires a folder.
    written = path if os.access(path, os.F_OK) else f"{path.parent}/."
    if not os.access(written, os.W_OK):
        raise click.BadParameter(f"{path} is not writable")
    return path


@click.command(cls=SectionedCommand, short_help="Generate a completion for a prompt.")
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
@click.option(
    "--receipt",
    "receipt_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    help="Request a signed receipt, and write it to this file for `specdec verify`.",
)
@served_model_flag
@client_flags
@sampling_flags
@output_flags
def generate(
    prompt: str,
    raw: bool,
    system: str | None,
    stream: bool | None,
    as_json: bool,
    receipt_file: Path | None,
    model: str,
    **flags: Any,
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
        has_receipt = receipt_file is not None
        chunks = client.generate_stream(content, params, model=model, receipt=has_receipt)
        result = receive(chunks, show)
    if as_json:
        show_json(result.outcome if stream else result.content | result.outcome)
    else:
        for line in result_lines(result, with_text=not stream):
            show_text(line)
        print_stderr(result.summary)
    if receipt_file is not None:
        _write_receipt(result.chunks[-1].receipt, receipt_file)


def _write_receipt(receipt: Receipt | None, path: Path) -> None:
    """Write a requested receipt; a service of an older version ignores the request."""
    if receipt is None:
        raise click.ClickException("the service returned no receipt")
    try:
        path.write_text(json.dumps(receipt.to_mapping()))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


@click.command(short_help="Tokenize a text.")
@click.argument("text")
@click.option(
    "--chat", "as_chat", is_flag=True, help="Apply the chat template to TEXT as a user message."
)
@json_flag
@served_model_flag
@client_flags
def tokenize(text: str, as_chat: bool, as_json: bool, model: str, **connection: Any) -> None:
    """Show the tokens of TEXT as the service tokenizes a prompt; - reads TEXT from stdin."""
    with Client(**connection) as client:
        result = client.tokenize(_prompt(text, None, not as_chat), model=model)
    if as_json:
        show_json(asdict(result))
        return
    for token_id, token in zip(result.token_ids, result.tokens, strict=True):
        click.echo(f"{token_id}\t{token}")
    count = counted(len(result.token_ids), "token")
    print_stderr(f"{count} (max_model_len is {result.max_model_len})")
