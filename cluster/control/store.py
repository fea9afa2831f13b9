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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec.types.control import AuditEntry
from specdec.types.errors import InvalidValueError, StorageError

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

_READ = """
SELECT version, overrides, updated_at_s, updated_by, reason, expires_at_s
FROM speculation WHERE service = ?
"""
_INSERT = """
INSERT OR IGNORE INTO speculation
VALUES (:service, :version, :overrides, :updated_at_s, :updated_by, :reason, :expires_at_s)
"""
_UPDATE = """
UPDATE speculation
SET version = :version, overrides = :overrides, updated_at_s = :updated_at_s,
    updated_by = :updated_by, reason = :reason, expires_at_s = :expires_at_s
WHERE service = :service AND version = :version - 1
"""
_LOG = """
INSERT OR REPLACE INTO audit
VALUES (:service, :version, :change, :updated_at_s, :updated_by, :reason)
"""
_TRIM_LOG = "DELETE FROM audit WHERE service = :service AND version <= :oldest"
_CHANGES = """
SELECT version, updated_at_s, updated_by, reason, change
FROM audit WHERE service = ? AND version < ? ORDER BY version DESC LIMIT ?
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
        except (OSError, StorageError) as error:
            reason = error.reason if isinstance(error, StorageError) else error
            limit = f"a directory that can be written to ({reason})"
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
        with self._connection() as connection:
            row = connection.execute(_READ, (self._service,)).fetchone()
        if row is None:
            return StoredSpeculation()
        version, overrides, *rest = row
        return StoredSpeculation(version, json.loads(overrides), *rest)

    def replace(self, stored: StoredSpeculation, change: Mapping[str, Any]) -> bool:
        """Write the next version; return False if its predecessor is not the stored one.

        change: the settings for the audit log, which keeps the latest thousand changes. Raises
        StorageError, for example if the disk is full; then nothing is written.
        """
        values = {
            **vars(stored),
            "service": self._service,
            "overrides": json.dumps(dict(stored.overrides)),
            "change": json.dumps(dict(change)),
            "oldest": stored.version - _MAX_AUDIT_ENTRIES,
        }
        with self._connection() as connection:
            cursor = connection.execute(_INSERT if stored.version == 1 else _UPDATE, values)
            if cursor.rowcount != 1:
                return False
            connection.execute(_LOG, values)
            connection.execute(_TRIM_LOG, values)
            return True

    def changes(self, before_version: int | None, count: int) -> list[AuditEntry]:
        """Return at most `count` changes, newest first, of versions below `before_version`."""
        before = 2**62 if before_version is None else before_version
        with self._connection() as connection:
            rows = connection.execute(_CHANGES, (self._service, before, count)).fetchall()
        return [
            AuditEntry(version, datetime.fromtimestamp(at_s, UTC), by, reason, json.loads(change))
            for version, at_s, by, reason, change in rows
        ]

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection and commit at the end, unless an error is raised."""
        try:
            with (
                closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as connection,
                connection,
            ):
                connection.execute("PRAGMA synchronous = FULL")
                yield connection
        except sqlite3.Error as error:
            raise StorageError(str(self._path), str(error)) from error


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
