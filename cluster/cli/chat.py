"""`specdec chat`: a conversation in the terminal.

Answers go to stdout, everything else to stderr, so that a script can talk too: one line each in,
the answers out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import click

from cluster.cli.completion_result import Answer, receive
from cluster.cli.connection_options import client_flags
from cluster.cli.help import SectionedCommand
from cluster.cli.sampling_options import answer_flags, sampling_params
from specdec.client import Client, ClientError
from specdec.types.chat import ChatMessage
from specdec.types.responses import StreamChunk
from specdec.types.sampling_params import SamplingParams
from specdec.types.stats import SpeculationStats

HELP = """\
/system TEXT  instruct the model from here on; no text takes the instruction back
/reset        begin anew; the instruction stays
/stats        what all answers so far took
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer."""


class Conversation:
    """What was said, with the instruction before it, and what the answers took."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None = None) -> None:
        self._client = client
        self._params = params
        self._system = system
        self._turns: list[ChatMessage] = []
        self._answers: list[Answer] = []

    def ask(self, text: str) -> None:
        """Shows the answer as it comes. Ctrl-C ends it; what was shown stays part of what was said.

        Raises ClientError, and then nothing was said.
        """
        question = ChatMessage("user", text)
        pieces: list[str] = []

        def show(chunk: StreamChunk) -> None:
            pieces.append(chunk.text)
            click.echo(chunk.text, nl=False)

        try:
            answer = self._receive(question, show)
        except KeyboardInterrupt:
            _say("stopped")
        else:
            self._answers.append(answer)
            _say(answer.summary)
        if pieces:
            self._turns += [question, ChatMessage("assistant", "".join(pieces))]

    def obey(self, line: str) -> bool:
        """Runs a line that begins with a slash; False when it says to leave."""
        command, _, argument = line.partition(" ")
        match command:
            case "/exit":
                return False
            case "/reset":
                self._turns.clear()
                _say("begun anew")
            case "/system":
                self._system = argument.strip() or None
                _say("instructed" if self._system else "no instruction any more")
            case "/stats":
                _say(self._statistics())
            case "/help":
                _say(HELP)
            case _:
                _say(f"{command} is no command; there are:\n{HELP}")
        return True

    def _receive(self, question: ChatMessage, show: Callable[[StreamChunk], None]) -> Answer:
        instructions = [ChatMessage("system", self._system)] if self._system else []
        chat = [*instructions, *self._turns, question]
        stream = self._client.generate_stream(chat, self._params)
        with closing(cast(Generator[StreamChunk, None, None], stream)) as chunks:
            try:
                return receive(chunks, show)
            finally:
                click.echo()

    def _statistics(self) -> str:
        usages = [answer.usage for answer in self._answers]
        speculation = SpeculationStats(
            sum(usage.speculation.num_drafts for usage in usages),
            sum(usage.speculation.num_draft_tokens for usage in usages),
            sum(usage.speculation.num_accepted_tokens for usage in usages),
        )
        num_tokens = sum(usage.completion_tokens for usage in usages)
        elapsed_s = sum(answer.total_s for answer in self._answers)
        return (
            f"{len(usages)} answer(s), {num_tokens} tokens, "
            f"{num_tokens / elapsed_s if elapsed_s else 0:.1f} tokens/s, "
            f"acceptance rate {speculation.acceptance_rate:.0%}, "
            f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
        )


def converse(conversation: Conversation, lines: Iterator[str], *, survives_errors: bool) -> None:
    """Answers line by line until they end or one says to leave.

    survives_errors: whether a refused question is reported and the talk goes on; else it raises.
    """
    for line in lines:
        if line.startswith("/"):
            if not conversation.obey(line):
                return
        elif line.strip():
            try:
                conversation.ask(line)
            except ClientError as error:
                if not survives_errors:
                    raise
                click.echo(f"error: {error}", err=True)


def typed_lines(read: Callable[[str], str] = input) -> Iterator[str]:
    """Lines from a terminal until Ctrl-D; Ctrl-C drops the line that is being typed."""
    while True:
        try:
            yield read("> ")
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit leaves)", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _piped_lines() -> Iterator[str]:
    """Bytes that are no UTF-8 are kept as they are on a command line, for the client to refuse."""
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _say(text: str) -> None:
    click.echo(click.style(text, dim=True), err=True)


@click.command(cls=SectionedCommand)
@click.option("--system", help="Instruction to begin with; /system changes it.")
@client_flags
@answer_flags
def chat(
    system: str | None,
    address: str,
    tls_ca_file: Path | None,
    api_key: str | None,
    timeout_s: float,
    **sampling: Any,
) -> None:
    """Talk with the model that is served. Lines may be piped in, too; /help lists commands."""
    params = sampling_params(**sampling)
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # from then on `input` can edit and recall lines
        _say("/help lists commands")
    with Client(address, timeout_s=timeout_s, tls_ca_file=tls_ca_file, api_key=api_key) as client:
        conversation = Conversation(client, params, system)
        lines = typed_lines() if is_typed else _piped_lines()
        converse(conversation, lines, survives_errors=is_typed)
