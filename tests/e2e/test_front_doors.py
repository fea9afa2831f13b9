"""The front doors of the running service: what strangers can reach, take and hold."""

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REBOUND = {"host": "rebound.example:8000", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/admin/speculation", {"mode": "off"}),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/dashboard/generate", {"prompt": "a", "max_tokens": 1}),
        ("GET", "/metrics", None),
    ],
)
def test_a_page_with_a_rebound_name_reaches_nothing(service, method, path, body):
    with httpx.Client(base_url=service.http_url, timeout=30) as http:
        before = http.get("/v1/admin/speculation").json()["version"]
        assert http.request(method, path, json=body, headers=REBOUND).status_code == 421
        assert http.get("/v1/admin/speculation").json()["version"] == before
