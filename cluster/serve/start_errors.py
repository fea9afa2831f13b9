"""Errors of the start of a service, and the wait for its end.

Errors of settings and files would occur again, so that such a start is not tried again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from specdec.types.errors import (
    InvalidValueError,
    ModelNotFoundError,
    OutOfMemoryError,
    SpecdecError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

    from cluster.workers.ray.resources import LocatedModels

_POLL_S = 0.2
_END_S = 30.0
"""Time for the command to end a replica after it has read why that refuses to start."""

_REPEATABLE = (InvalidValueError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError)
"""Errors of configuration and files, which occur again with the same ones."""

_BEFORE_REASON = "not started, as a retry would fail again: "


class StartupError(SpecdecError):
    """The service did not start; the message contains the reason."""


class InterruptedStartError(StartupError):
    """The service did not start for a reason that may not occur again."""


class RefusedStartError(SpecdecError):
    """A replica cannot start with its configuration and files.

    Serve reports the text of an error, from which `wait_until_running` takes the reason.
    """

    def __str__(self) -> str:
        return _BEFORE_REASON + " ".join(super().__str__().split())


@contextmanager
def refusing_repeatable(located: LocatedModels | None) -> Iterator[None]:
    """Raise RefusedStartError in place of errors that another attempt would repeat.

    A command that waits for the start reads the reason from a file and ends this process, which
    waits for that: Serve would log the error with its traceback.
    """
    try:
        yield
    except _REPEATABLE as error:
        refused = RefusedStartError(str(error))
        refusal = None if located is None else located.refusal
        if refusal is not None and refusal.is_file():
            with suppress(OSError):  # Serve logs the error instead
                refusal.write_text(str(refused), encoding="utf-8")
                time.sleep(_END_S)
        raise refused from None


def _reason_in(text: str) -> str | None:
    """Return the reason of a RefusedStartError in a text; None without one."""
    line = next((each for each in text.splitlines() if _BEFORE_REASON in each), None)
    return None if line is None else line.partition(_BEFORE_REASON)[2]


def wait_until_running(names: Sequence[str], refusal: IO[str]) -> None:
    """Return when all applications run. Raises StartupError for one that cannot.

    refusal: file of `refusing_repeatable`, which replicas on other nodes cannot write. Serve tries
    to start a replica three times, also where files or configuration are at fault.
    """
    from ray import serve

    while waiting := _not_running(serve.status().applications, names):
        refusal.seek(0)
        for messages in ([refusal.read()], *map(_messages, waiting)):
            if (reason := _reason_in("\n".join(messages))) is not None:
                raise StartupError(reason)
        for application in waiting:
            if application.status == "DEPLOY_FAILED":
                reason = _last_line(_messages(application))
                raise InterruptedStartError(f"the Router did not start: {reason}")
        time.sleep(_POLL_S)


def _not_running(
    found: Mapping[str, ApplicationStatusOverview], names: Sequence[str]
) -> list[ApplicationStatusOverview]:
    return [found[name] for name in names if found[name].status != "RUNNING"]


def _messages(application: ApplicationStatusOverview) -> list[str]:
    return [application.message, *(each.message for each in application.deployments.values())]


def _last_line(messages: Sequence[str]) -> str:
    """Return the last line: an error without its traceback."""
    return [line.strip() for each in messages for line in each.splitlines() if line.strip()][-1]
