"""What operators have set, on disk: it outlasts every process of the service.

SQLite with a write-ahead log. A change that was written is there after a kill or a power failure,
and one that was made for another version than the present one is not written at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specdec.errors import InvalidValueError

_FILE_NAME = "control.sqlite3"
_BUSY_TIMEOUT_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS speculation (
    service TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    overrides TEXT NOT NULL,
    updated_at_s REAL NOT NULL,
    updated_by TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT
"""


@dataclass(frozen=True)
class StoredSpeculation:
    """What operators have set, by name of the value, and who did it last.

    version: counts the changes. updated_at_s: seconds since 1970.
    """

    version: int = 0
    overrides: Mapping[str, str | int] = field(default_factory=dict)
    updated_at_s: float = 0.0
    updated_by: str = ""
    reason: str = ""


class ControlStore:
    """One service's row. Holds no connection open: it is asked only when something changes."""

    def __init__(self, directory: Path, service: str) -> None:
        """Makes directory and table where they are missing. Raises InvalidValueError if it can't.

        service: whose row, such as the name of the model; others may share the directory.
        """
        self._path = directory / _FILE_NAME
        self._service = service
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._connection() as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            limit = f"a directory that can be written to ({error})"
            raise InvalidValueError("state_dir", str(directory), limit) from error

    def read(self) -> StoredSpeculation:
        """What is stored; version 0 where nothing ever was."""
        query = (
            "SELECT version, overrides, updated_at_s, updated_by, reason "
            "FROM speculation WHERE service = ?"
        )
        with self._connection() as connection:
            row = connection.execute(query, (self._service,)).fetchone()
        if row is None:
            return StoredSpeculation()
        version, overrides, *rest = row
        return StoredSpeculation(version, json.loads(overrides), *rest)

    def replace(self, stored: StoredSpeculation) -> bool:
        """Writes what shall follow the version before it; False if that is not the present one."""
        values = (
            stored.version,
            json.dumps(dict(stored.overrides)),
            stored.updated_at_s,
            stored.updated_by,
            stored.reason,
        )
        with self._connection() as connection:
            if stored.version == 1:
                statement = "INSERT OR IGNORE INTO speculation VALUES (?, ?, ?, ?, ?, ?)"
                cursor = connection.execute(statement, (self._service, *values))
            else:
                statement = (
                    "UPDATE speculation SET version = ?, overrides = ?, updated_at_s = ?, "
                    "updated_by = ?, reason = ? WHERE service = ? AND version = ?"
                )
                cursor = connection.execute(statement, (*values, self._service, stored.version - 1))
            return cursor.rowcount == 1

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Commits at the end, unless an error ends it."""
        with (
            closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as connection,
            connection,
        ):
            connection.execute("PRAGMA synchronous = FULL")
            yield connection


def state_dir(configured: Path | None) -> Path:
    """Where to keep what operators want; the working directory may change, so as a whole path.

    Where nothing is configured, the XDG base directory specification has a place for what a
    user's programs must not forget.
    """
    if configured is not None:
        return configured.absolute()
    base = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths are to be ignored, says the specification.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return root / "specdec"
