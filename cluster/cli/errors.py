"""How the command ends where something goes wrong.

Exit code 1 is for what a caller can cause and for what nobody expected, 2 for wrong usage, 130 for
Ctrl-C. With 1 goes one line on stderr, which is a JSON object where the command was given --json.
"""

from __future__ import annotations

import json
import os
from typing import Any

import click

from specdec.client import ClientError
from specdec.types.errors import InvalidValueError, SpecdecError

DEBUG_VARIABLE = "SPECDEC_DEBUG"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_AS_JSON = "cluster.cli.errors.as_json"


class OneLineErrors(click.Group):
    """Ends every failure in one line on stderr instead of a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Notes on the way whether the command shall print JSON."""
        ctx.meta[_AS_JSON] = _asks_for_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that is named, and says what came of it."""
        as_json = ctx.meta[_AS_JSON]
        try:
            return super().invoke(ctx)
        except (SpecdecError, ClientError) as error:
            _fail(ctx, error, str(error), as_json)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            told = f"unexpected {reason} (set {DEBUG_VARIABLE}=1 to see the traceback)"
            _fail(ctx, error, told, as_json)


def _asks_for_json(arguments: list[str]) -> bool:
    """Whether --json is among the flags; what follows a bare -- is text."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:end]


def _fail(ctx: click.Context, error: Exception, message: str, as_json: bool) -> None:
    told = json.dumps({"error": _as_json(error, message)}) if as_json else f"error: {message}"
    click.echo(told, err=True)
    ctx.exit(EXIT_FAILED)


def _as_json(error: Exception, message: str) -> dict[str, str]:
    """kind: a gRPC status, or the name of the error; field and limit of a value that is wrong."""
    if isinstance(error, ClientError):
        return {"kind": error.code.name, "message": message}
    if isinstance(error, InvalidValueError):
        return {
            "kind": "INVALID_ARGUMENT",
            "message": message,
            "field": error.field,
            "limit": error.limit,
        }
    return {"kind": type(error).__name__, "message": message}
