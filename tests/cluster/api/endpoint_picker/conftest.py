"""Pickers and replicas on one event loop, which may be late."""

import pytest

from cluster.api.endpoint_picker import scraper


@pytest.fixture(autouse=True)
def patient_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no scrape fail because the event loop of a busy machine is late."""
    monkeypatch.setattr(scraper, "_TIMEOUT_S", 30.0)
