"""How log lines look: one each, as text or as JSON, with the id of the request that it is about.

Lines go to stderr, in each process of the service. A field is added by `extra={...}`; the prompt
and the answer of a request never are.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Set where a request's id is known, in the task or thread that works on it alone."""

_OURS = ("cluster", "specdec", "uvicorn")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# What the filters of Ray Serve and the formatter of uvicorn go by.
_OTHERS_OWN = frozenset({"skip_context_filter", "serve_access_log", "color_message"})


@dataclass(frozen=True)
class LogConfig:
    """What is written, and how."""

    level: LogLevel = "warning"
    format: LogFormat = "text"


def configure(config: LogConfig) -> None:
    """Sets this process's logging; what was set before is replaced.

    Our loggers write from `config.level` on, everybody else's from `warning` on. Ray Serve's has a
    handler of its own, and gets our format.
    """
    formatter = JsonFormatter() if config.format == "json" else TextFormatter()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(config.level.upper())
    for other in logging.getLogger("ray.serve").handlers:
        if type(other) is logging.StreamHandler:  # a file has its own readers
            other.setFormatter(formatter)


class TextFormatter(logging.Formatter):
    """`time level logger (process) [request id] message key=value ...`, then any traceback.

    A line break inside a message is written as two characters, so that nobody can forge a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The whole entry."""
        request_id = _request_id(record)
        about = f" [{request_id}]" if request_id else ""
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        head = f"{_timestamp(record)} {record.levelname:<7} {record.name} ({record.process})"
        line = f"{head}{about} {message}{fields}"
        traceback = _traceback(record, self)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, pid, message, request_id, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole entry; a value that JSON does not know is written as text."""
        entry: dict[str, Any] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        optional = {"request_id": _request_id(record), "traceback": _traceback(record, self)}
        entry |= {name: value for name, value in optional.items() if value}
        return json.dumps({**entry, **_fields(record)}, default=str)


def _request_id(record: logging.LogRecord) -> str | None:
    return getattr(record, "request_id", None) or current_request_id.get()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller added by `extra`; Ray adds fields of its own, with an underscore."""
    known = _STANDARD | _OTHERS_OWN | {"request_id"}
    return {
        name: value
        for name, value in vars(record).items()
        if name not in known and not name.startswith("_")
    }


def _timestamp(record: logging.LogRecord) -> str:
    """UTC, to the millisecond, as RFC 3339 has it."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _traceback(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
