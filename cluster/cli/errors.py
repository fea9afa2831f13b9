"""Error handling of the command line.

Exit code 1 means that the command failed, 2 that its usage was wrong, or that a service or a model
cannot be loaded with these settings and files, 130 that Ctrl-C interrupted it. A failure prints one
line to stderr, which is a JSON object if --json was given.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cluster.cli.output import print_stderr, warnings_on_stderr
from cluster.config.running_services import running_services
from cluster.config.secrets import API_KEY_VARIABLE, TOKEN_VARIABLE
from specdec.types.errors import InvalidValueError, SpecdecError

if TYPE_CHECKING:
    from specdec.client import ClientError

DEBUG_VARIABLE = "SPECDEC_DEBUG"
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
_HINTS = {
    "UNAUTHENTICATED": f" (here: ${API_KEY_VARIABLE}, or ${TOKEN_VARIABLE} for operators' commands)"
}
"""How commands give what a call lacked, by the gRPC status of the call."""
_CLIENT_LOGGER = "specdec.client"
"""Its warnings report that an interrupted stream is tried again."""
_AS_JSON = "cluster.cli.errors.as_json"
PRINT_ERROR = "cluster.cli.errors.print_error"
"""Name in a context's meta of the function that prints an error, instead of `print_stderr`."""


class OrderError(SpecdecError):
    """Replicas have not confirmed an order: they refused it, or did not answer."""


class OneLineErrors(click.Group):
    """Command group that reports a failure in one line on stderr instead of a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and record whether --json is among them."""
        ctx.meta[_AS_JSON] = _has_json_flag(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first argument; the error of an unknown one names the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            nearest = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not nearest:
                raise
            message = f"{error.message} Did you mean {nearest[0]!r}?"
            raise click.UsageError(message, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn exceptions into messages and exit codes."""
        as_json = ctx.meta[_AS_JSON]
        try:
            with nullcontext() if as_json else warnings_on_stderr(_CLIENT_LOGGER):
                return super().invoke(ctx)
        except SpecdecError as error:
            fail(ctx, error, str(error), as_json)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            fail(ctx, error, _usage_message(error), as_json, error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these
        except Exception as error:
            if (failed_call := _client_error(error)) is not None:
                fail(ctx, error, _call_message(failed_call), as_json)
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            fail(ctx, error, _message(error), as_json)


@contextmanager
def exits_as_unusable(*others: type[SpecdecError]) -> Iterator[None]:
    """Exit with EXIT_UNUSABLE for errors that settings and files are at fault for, not `others`."""
    try:
        yield
    except others:
        raise
    except SpecdecError as error:
        ctx = click.get_current_context()
        fail(ctx, error, str(error), ctx.meta[_AS_JSON], EXIT_UNUSABLE)


def _message(error: Exception) -> str:
    """Return the system's reason for a file, what is not UTF-8, or how to see the traceback."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        other = "" if error.filename2 is None else f" -> {error.filename2}"
        return " ".join(f"{error.filename}{other}: {error.strerror}".split())
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        # an argument whose bytes are not UTF-8
        return f"text is {error.object[:80]!r}; it must be valid Unicode"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected {reason} (set {DEBUG_VARIABLE}=1 to see the traceback)"


def _call_message(error: ClientError) -> str:
    """Return the message of a failed call, with what would help here."""
    from specdec.client.errors import HTTP_PORT

    for service in running_services() if error.message.endswith(HTTP_PORT) else ():
        if error.message.startswith(f"{service.http_address} "):
            return f"{service.http_address} is the HTTP port; use {service.grpc_address}"
    return f"{error}{_HINTS.get(error.code.name, '')}"


def _usage_message(error: click.UsageError) -> str:
    """Return the message of click in one line, with the command that shows the usage."""
    text = " ".join(error.format_message().split())
    return text if error.ctx is None else f"{text} (see {error.ctx.command_path} --help)"


def _has_json_flag(arguments: list[str]) -> bool:
    """Return whether --json is among the flags; arguments after a bare -- are text."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:end]


def fail(
    ctx: click.Context,
    error: Exception,
    message: str,
    as_json: bool,
    exit_code: int = EXIT_FAILED,
) -> NoReturn:
    """Print an error to stderr, in one line or as JSON, and exit."""
    line = json.dumps({"error": _as_json(error, message)}) if as_json else f"error: {message}"
    ctx.meta.get(PRINT_ERROR, print_stderr)(line)
    ctx.exit(exit_code)


def _as_json(error: Exception, message: str) -> dict[str, str]:
    """Return kind (a gRPC status or the error's class), message, and field and limit if known."""
    if (failed_call := _client_error(error)) is not None:
        return {"kind": failed_call.code.name, "message": message}
    if isinstance(error, InvalidValueError):
        return {
            "kind": "INVALID_ARGUMENT",
            "message": message,
            "field": error.field,
            "limit": error.limit,
        }
    is_usage = isinstance(error, click.UsageError)
    return {"kind": "INVALID_ARGUMENT" if is_usage else type(error).__name__, "message": message}


def _client_error(error: Exception) -> ClientError | None:
    """Return the error as that of a call to a service; None for another one.

    Commands that call no service do not import the client, which needs gRPC.
    """
    if "specdec.client" not in sys.modules:
        return None
    from specdec.client import ClientError

    return error if isinstance(error, ClientError) else None
