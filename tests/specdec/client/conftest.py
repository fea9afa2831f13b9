"""A fake service and its client; calls are retried without the pauses that a service needs."""

import pytest

from specdec.client import Client, connection
from tests.specdec.client.fake_service import FakeService, running


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    """Shorten the first pause, on which the others depend; causes and number of attempts stay."""
    pause, short = '"initialBackoff": "0.2s"', '"initialBackoff": "0.01s"'
    *others, (name, policy) = connection._OPTIONS
    assert pause in policy
    monkeypatch.setattr(connection, "_OPTIONS", [*others, (name, policy.replace(pause, short))])


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.address, timeout_s=10) as client:
        yield client
