"""Persistent store of the operators' settings, independent of the service's processes.

SQLite with a write-ahead log. A committed change survives a kill or a power failure, and a change
based on an outdated version is not written.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.types.errors import InvalidValueError

_FILE_NAME = "control.sqlite3"
_BUSY_TIMEOUT_S = 2.0
_FORMAT = 2
"""File format. Format 1, which has no version number, had neither expiry nor audit log."""

_MAX_AUDIT_ENTRIES = 1000
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
_AUDIT_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    service TEXT NOT NULL,
    version INTEGER NOT NULL,
    change TEXT NOT NULL,
    updated_at_s REAL NOT NULL,
    updated_by TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (service, version)
) STRICT
"""


@dataclass(frozen=True)
class StoredSpeculation:
    """The operators' settings by name, and their last change.

    version: the number of changes. overrides: plain data. updated_at_s, expires_at_s: seconds since
    1970; None: they never expire.
    """

    version: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    updated_at_s: float = 0.0
    updated_by: str = ""
    reason: str = ""
    expires_at_s: float | None = None


@dataclass(frozen=True)
class StoredChange:
    """Audit log entry: the change that created a version, as plain data."""

    version: int
    change: Mapping[str, Any]
    updated_at_s: float
    updated_by: str
    reason: str


class ControlStore:
    """Settings of one service. Opens a connection for each call, since changes are rare."""

    def __init__(self, directory: Path, service: str) -> None:
        """Create directory and tables where missing. Raises InvalidValueError if that fails.

        Migrates a file of an earlier format and refuses one of a later. service: names the row,
        such as the name of the model; several services may share the directory.
        """
        self._path = directory / _FILE_NAME
        self._service = service
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._connection() as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            with self._connection() as connection:
                self._migrate(connection)
        except (OSError, sqlite3.Error) as error:
            limit = f"a directory that can be written to ({error})"
            raise InvalidValueError("state_dir", str(directory), limit) from error

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Migrate in one transaction, so that of two processes only one does."""
        connection.execute("BEGIN IMMEDIATE")
        [found] = connection.execute("PRAGMA user_version").fetchone()
        if found > _FORMAT:
            limit = f"one with a {_FILE_NAME} of format {_FORMAT} or earlier; this is of {found}"
            raise InvalidValueError("state_dir", str(self._path.parent), limit)
        if found < _FORMAT:
            connection.execute(_SCHEMA)
            connection.execute("ALTER TABLE speculation ADD COLUMN expires_at_s REAL")
            connection.execute(_AUDIT_SCHEMA)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")

    def read(self) -> StoredSpeculation:
        """Return the stored settings; version 0 if there are none."""
        query = (
            "SELECT version, overrides, updated_at_s, updated_by, reason, expires_at_s "
            "FROM speculation WHERE service = ?"
        )
        with self._connection() as connection:
            row = connection.execute(query, (self._service,)).fetchone()
        if row is None:
            return StoredSpeculation()
        version, overrides, *rest = row
        return StoredSpeculation(version, json.loads(overrides), *rest)

    def replace(self, stored: StoredSpeculation, change: Mapping[str, Any]) -> bool:
        """Write the next version; return False if its predecessor is not the stored one.

        change: the settings for the audit log, which keeps the latest thousand changes.
        """
        values = (
            stored.version,
            json.dumps(dict(stored.overrides)),
            stored.updated_at_s,
            stored.updated_by,
            stored.reason,
            stored.expires_at_s,
        )
        with self._connection() as connection:
            if stored.version == 1:
                statement = "INSERT OR IGNORE INTO speculation VALUES (?, ?, ?, ?, ?, ?, ?)"
                cursor = connection.execute(statement, (self._service, *values))
            else:
                statement = (
                    "UPDATE speculation SET version = ?, overrides = ?, updated_at_s = ?, "
                    "updated_by = ?, reason = ?, expires_at_s = ? WHERE service = ? AND version = ?"
                )
                cursor = connection.execute(statement, (*values, self._service, stored.version - 1))
            if cursor.rowcount != 1:
                return False
            self._log(connection, stored, change)
            return True

    def _log(
        self, connection: sqlite3.Connection, stored: StoredSpeculation, change: Mapping[str, Any]
    ) -> None:
        entry = (
            self._service,
            stored.version,
            json.dumps(dict(change)),
            stored.updated_at_s,
            stored.updated_by,
            stored.reason,
        )
        connection.execute("INSERT OR REPLACE INTO audit VALUES (?, ?, ?, ?, ?, ?)", entry)
        oldest = stored.version - _MAX_AUDIT_ENTRIES
        statement = "DELETE FROM audit WHERE service = ? AND version <= ?"
        connection.execute(statement, (self._service, oldest))

    def changes(self, before_version: int | None, count: int) -> list[StoredChange]:
        """Return at most `count` changes, newest first, of versions below `before_version`."""
        query = (
            "SELECT version, change, updated_at_s, updated_by, reason FROM audit "
            "WHERE service = ? AND version < ? ORDER BY version DESC LIMIT ?"
        )
        before = 2**62 if before_version is None else before_version
        with self._connection() as connection:
            rows = connection.execute(query, (self._service, before, count)).fetchall()
        return [StoredChange(version, json.loads(text), *rest) for version, text, *rest in rows]

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection and commit at the end, unless an error is raised."""
        with (
            closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as connection,
            connection,
        ):
            connection.execute("PRAGMA synchronous = FULL")
            yield connection


def state_dir(configured: Path | None) -> Path:
    """Return the absolute path of the store's directory; the working directory may change.

    Without a configured one, it is in the state directory of the XDG base directory specification.
    """
    if configured is not None:
        return configured.absolute()
    base = os.environ.get("XDG_STATE_HOME", "")
    # The specification requires relative paths to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return root / "specdec"
