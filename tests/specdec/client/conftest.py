"""A fake service and its client; calls are retried without the pauses that a service needs."""

import pytest

from specdec.client import Client, async_client, attempts, connection, resumption
from tests.specdec.client.fake_service import FakeService, running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Shorten the pauses; the number of attempts stays."""
    short = (0.01, 0.02, 0.04)
    assert len(short) == len(attempts.RETRY_DELAYS_S)
    for module in (attempts, async_client, connection, resumption):
        monkeypatch.setattr(module, "RETRY_DELAYS_S", short)


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.address, timeout_s=10) as client:
        yield client
