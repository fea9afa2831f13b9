"""The `specdec` command: serve a model, ask it, talk with it, steer it, fetch models.

Answers go to stdout, everything else to stderr. What a caller can cause becomes one line and exit
code 1, wrong usage exit code 2, Ctrl-C 130. Whatever takes long to import is imported where it is
used, so that `specdec generate` starts at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster import admin_cli
from cluster.answer import chunk_as_json, receive
from cluster.bench_cli import bench
from cluster.chat import chat
from cluster.cli_answer import SectionedCommand, answer_flags, report_flags, sampling_params
from cluster.cli_connection import connection_flags
from cluster.cli_output import lines_of
from cluster.config import ServeConfig, settings
from cluster.doctor import doctor
from cluster.several_models import read_models
from specdec.client import Client, ClientError, StreamChunk
from specdec.errors import SpecdecError
from specdec.tokenizer import ChatMessage

DEBUG_VARIABLE = "SPECDEC_DEBUG"
EXIT_INTERRUPTED = 130

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _OneLineErrors(click.Group):
    """Ends every failure in one line on stderr instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SpecdecError, ClientError) as error:
            _fail(ctx, str(error))
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _fail(ctx, f"unexpected {reason} (set {DEBUG_VARIABLE}=1 to see the traceback)")


def _fail(ctx: click.Context, reason: str) -> None:
    click.echo(f"error: {reason}", err=True)
    ctx.exit(1)


def _report(line: str) -> None:
    click.echo(line, err=True)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specdec", message="specdec %(version)s")
def main() -> None:
    """Serve LLMs with speculative decoding."""


@main.command("version")
def show_version() -> None:
    """Print the version."""
    click.echo(f"specdec {version('specdec')}")


def _setting_flags(command: _Command) -> _Command:
    """One flag for each field of ServeConfig, which says what it means and what it may be."""
    for name, setting in reversed(settings().items()):
        limit, flag = setting.limit, name.replace("_", "-")
        if limit.kind is bool:
            command = click.option(f"--{flag}/--no-{flag}", default=None, help=setting.help)(
                command
            )
            continue
        kind = click.Choice(limit.options) if limit.options else limit.kind
        command = click.option(f"--{flag}", type=kind, help=setting.help)(command)
    return command


@main.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of the settings below, with underscores in their names; flags win over it.",
)
@_setting_flags
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve a model over gRPC and HTTP until Ctrl-C."""
    given = {name: value for name, value in flags.items() if value is not None}
    if config_file is None:
        config, *others = [ServeConfig.from_mapping(given)]
    else:
        config, *others = read_models(config_file, given)
    for warning in config.warnings:
        _report(f"warning: {warning}")
    from cluster.service import serve_forever

    serve_forever(config, _report, others)


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
    _echo_json(chunk_as_json(chunk))


def _show_nothing(chunk: StreamChunk) -> None:
    """Leaves it all to the end."""


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


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


@main.command(cls=SectionedCommand)
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
@connection_flags
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
    with Client(address, timeout_s=timeout_s, tls_ca_file=tls_ca_file) as client, shown as show:
        answer = receive(client.generate_stream(content, params), show)
    if as_json:
        _echo_json(answer.outcome if stream else answer.content | answer.outcome)
        return
    for line in lines_of(answer, with_text=not stream):
        click.echo(line)
    _report(answer.summary)


main.add_command(bench)
main.add_command(chat)
main.add_command(doctor)
main.add_command(admin_cli.status)
main.add_command(admin_cli.speculation)
main.add_command(admin_cli.profile)


@main.group()
def models() -> None:
    """Fetch models, and list those that have a short name."""


@models.command("fetch")
@click.argument("name")
def fetch_model(name: str) -> None:
    """Fetch the model called NAME, an alias or a Hugging Face Hub id, and print where it is."""
    from specdec.models.store import resolve

    click.echo(resolve(name, progress=_report))


@models.command("list")
def list_models() -> None:
    """List the aliases, and which of them are in the cache."""
    from specdec.cache import default_cache_dir
    from specdec.models.store import ALIASES

    cache = default_cache_dir() / "models"
    for name, source in ALIASES.items():
        is_cached = (cache / name).is_dir()
        to_fetch = f"not fetched ({source.download_bytes / 1e6:.0f} MB)"
        click.echo(f"{name}\t{cache / name if is_cached else to_fetch}")
