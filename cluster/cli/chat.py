"""`specdec chat`: an interactive conversation in the terminal.

The model's output goes to stdout, everything else to stderr, so that scripts can pipe one message
per line in and read the output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any, cast

import click

from cluster.cli.completion_result import CompletionResult, receive
from cluster.cli.options import (
    client_flags,
    pop_connection,
    sampling_flags,
    sampling_params,
    served_model_flag,
)
from cluster.cli.output import SectionedCommand, counted, show_text
from specdec.client import Client, ClientError
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage
from specdec.types.responses import StreamChunk
from specdec.types.sampling.sampling_params import SamplingParams

HELP = """\
/system TEXT  set the system message; without TEXT remove it
/reset        start a new conversation; the system message stays
/stats        show statistics of all completions so far
/exit         quit, like Ctrl-D
Ctrl-C stops the current completion."""


class Conversation:
    """A chat history with its system message, and the statistics of its completions."""

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        system: str | None = None,
        model: str = "",
    ) -> None:
        """Start without turns. model: of the service; empty: the first."""
        self._client = client
        self._params = params
        self._system = system
        self._model = model
        self._turns: list[ChatMessage] = []
        self._results: list[CompletionResult] = []

    def send(self, text: str) -> None:
        """Send a user message and stream the reply to stdout.

        Ctrl-C stops the reply; the part that was shown stays in the history. Raises ClientError if
        the request fails, or InvalidValueError if it cannot be sent, and leaves the history
        unchanged.
        """
        message = ChatMessage("user", text)
        pieces: list[str] = []

        def show(chunk: StreamChunk) -> None:
            pieces.append(chunk.text)
            show_text(chunk.text, nl=False)

        try:
            result = self._receive(message, show)
        except KeyboardInterrupt:
            _notify("stopped")
        else:
            self._results.append(result)
            _notify(result.summary)
        if pieces:
            self._turns += [message, ChatMessage("assistant", "".join(pieces))]

    def run_command(self, line: str) -> bool:
        """Run a command line that begins with a slash; return False for /exit."""
        command, _, argument = line.partition(" ")
        match command:
            case "/exit":
                return False
            case "/reset":
                self._turns.clear()
                _notify("conversation reset")
            case "/system":
                self._system = argument.strip() or None
                _notify("system message set" if self._system else "system message removed")
            case "/stats":
                _notify(self._statistics())
            case "/help":
                _notify(HELP)
            case _:
                _notify(f"unknown command {command}; the commands are:\n{HELP}")
        return True

    def _receive(
        self, message: ChatMessage, show: Callable[[StreamChunk], None]
    ) -> CompletionResult:
        system = [ChatMessage("system", self._system)] if self._system else []
        chat = [*system, *self._turns, message]
        stream = self._client.generate_stream(chat, self._params, model=self._model)
        with closing(cast(Generator[StreamChunk, None, None], stream)) as chunks:
            try:
                return receive(chunks, show)
            finally:
                click.echo()

    def _statistics(self) -> str:
        usages = [result.usage for result in self._results]
        speculation = SpeculationStats.sum(usage.speculation for usage in usages)
        num_tokens = sum(usage.completion_tokens for usage in usages)
        elapsed_s = sum(result.total_s for result in self._results)
        return (
            f"{counted(len(usages), 'completion')}, {counted(num_tokens, 'token')}, "
            f"{num_tokens / elapsed_s if elapsed_s else 0:.1f} tokens/s, "
            f"acceptance rate {speculation.acceptance_rate:.0%}, "
            f"acceptance length {speculation.mean_acceptance_length:.2f}"
        )


def run_chat(conversation: Conversation, lines: Iterator[str], *, continue_on_error: bool) -> None:
    """Send messages and run commands line by line, until the input ends or /exit.

    continue_on_error: whether to print the error of a failed request and go on; else raise it.
    """
    for line in lines:
        if line.startswith("/"):
            if not conversation.run_command(line):
                return
        elif line.strip():
            try:
                conversation.send(line)
            except (ClientError, InvalidValueError) as error:
                if not continue_on_error:
                    raise
                click.echo(f"error: {error}", err=True)


def typed_lines(read: Callable[[str], str] = input) -> Iterator[str]:
    """Yield lines from a terminal until Ctrl-D; Ctrl-C discards the current line."""
    while True:
        try:
            yield read("> ")
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit quits)", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _piped_lines() -> Iterator[str]:
    """Yield lines of stdin; invalid UTF-8 becomes surrogates, which the client rejects."""
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _notify(text: str) -> None:
    click.echo(click.style(text, dim=True), err=True)


@click.command(cls=SectionedCommand, short_help="Chat with the served model.")
@click.option("--system", help="System message; /system changes it.")
@served_model_flag
@client_flags
@sampling_flags
def chat(system: str | None, model: str, **flags: Any) -> None:
    """Chat with the served model; /help lists the commands.

    Messages may also be piped in, one per line.
    """
    connection = pop_connection(flags)
    params = sampling_params(**flags)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  # adds line editing and history to `input`
        _notify("/help lists commands")
    with Client(**connection) as client:
        conversation = Conversation(client, params, system, model)
        lines = typed_lines() if is_interactive else _piped_lines()
        run_chat(conversation, lines, continue_on_error=is_interactive)
