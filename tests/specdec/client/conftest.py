"""Calls are retried without the long pauses that a service needs."""

import pytest

from specdec.client import connection


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    """Shorten the first pause, on which the others depend; causes and number of attempts stay."""
    pause, short = '"initialBackoff": "0.2s"', '"initialBackoff": "0.01s"'
    *others, (name, policy) = connection._OPTIONS
    assert pause in policy
    monkeypatch.setattr(connection, "_OPTIONS", [*others, (name, policy.replace(pause, short))])
