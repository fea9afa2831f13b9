from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from cluster.http import make_app
from specdec.errors import TargetFailedError

LOST = TargetFailedError("rank 1 failed: secret detail")


@pytest.mark.parametrize(
    ("router", "health", "ready"),
    [
        (SimpleNamespace(is_ready=False, failure=None), 200, 503),
        (SimpleNamespace(is_ready=True, failure=None), 200, 200),
        (SimpleNamespace(is_ready=False, failure=LOST), 503, 503),
    ],
    ids=["loading", "ready", "lost"],
)
def test_liveness_and_readiness(router, health, ready):
    client = TestClient(make_app(lambda: router, lambda: None))
    assert client.get("/health").status_code == health
    assert client.get("/ready").status_code == ready
    assert "secret" not in client.get("/health").text + client.get("/ready").text


def test_there_is_nothing_else():
    client = TestClient(make_app(lambda: SimpleNamespace(), lambda: None))
    assert [client.get(path).status_code for path in ("/", "/docs", "/redoc")] == [404] * 3
