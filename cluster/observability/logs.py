"""Structured logging as text or JSON, one line for each record, with the request id.

Every process of the service logs to stderr. `extra={...}` adds fields; prompts and outputs of
requests are never logged.
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
"""The id of the request that the current task or thread serves."""

SERVE_LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}
"""Levels of Ray Serve's log by ours: at INFO it logs every call, as the service does in detail."""

_OURS = ("cluster", "specdec", "uvicorn")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Attributes that the filters of Ray Serve and the formatter of uvicorn use.
_INTERNAL = frozenset({"skip_context_filter", "serve_access_log", "color_message"})


@dataclass(frozen=True)
class LogConfig:
    """Logging level and format."""

    level: LogLevel = "warning"
    format: LogFormat = "text"


def configure(config: LogConfig) -> None:
    """Configure logging of this process, replacing the previous configuration.

    Our loggers use `config.level`, all others `warning`. The handler of Ray Serve's logger gets our
    formatter.
    """
    formatter = JsonFormatter() if config.format == "json" else TextFormatter()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(config.level.upper())
    for other in logging.getLogger("ray.serve").handlers:
        if type(other) is logging.StreamHandler:  # keep the format of Serve's log files
            other.setFormatter(formatter)


class TextFormatter(logging.Formatter):
    """Formatter for `time level logger (process) [request id] message key=value ...`.

    A traceback follows on further lines. Line breaks in a message are escaped, which prevents log
    injection.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with its traceback."""
        request_id = _request_id(record)
        about = f" [{request_id}]" if request_id else ""
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        head = f"{_timestamp(record)} {record.levelname:<7} {record.name} ({record.process})"
        line = f"{head}{about} {message}{fields}"
        traceback = _traceback(record, self)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """Formatter for JSON lines: ts, level, logger, pid, message, request_id and added fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object of a record; values that JSON does not support become text."""
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
    """Return the fields added by `extra`, without Ray's, which begin with an underscore."""
    known = _STANDARD | _INTERNAL | {"request_id"}
    return {
        name: value
        for name, value in vars(record).items()
        if name not in known and not name.startswith("_")
    }


def _timestamp(record: logging.LogRecord) -> str:
    """Return the time in UTC with milliseconds, as RFC 3339."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _traceback(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
