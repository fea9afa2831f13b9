"""A disk without room for the operators' settings, by SQLite's own limit of a file."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no database grow beyond its present size."""
    connect = sqlite3.connect

    def connect_to_full(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 1")  # raised to the present size
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_full)
