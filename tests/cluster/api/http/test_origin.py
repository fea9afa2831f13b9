"""The check of the host name that a request is addressed to."""

import socket
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from cluster.api.http.forwarding import ForwardedRequest, answer
from cluster.api.http.limits import HttpLimits
from cluster.api.http.origin import AllowedHosts
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import UnknownHostError

READY = SimpleNamespace(is_ready=True, failure=None)


def application(hosts):
    return make_app(lambda: READY, lambda: None, get_limits=lambda: HttpLimits(hosts))


def hosts_of(*, has_keys=False, **settings):
    return AllowedHosts.of(ServeConfig(device="cpu", **settings), has_keys=has_keys)


@pytest.mark.parametrize("path", ["/ready", "/v1/models", "/v1/admin/speculation", "/dashboard"])
def test_a_page_whose_name_was_rebound_to_this_service_is_refused(path):
    client = TestClient(application(hosts_of()), base_url="http://127.0.0.1:8000")
    headers = {"host": "rebound.example:8000", "sec-fetch-site": "same-origin"}
    response = client.get(path, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 421
    assert "'rebound.example'" in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert error["code"] == "host_not_allowed"


def test_a_change_by_such_a_page_has_no_effect():
    class Admin:
        access = None

        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    app = make_app(lambda: READY, Admin, get_limits=lambda: HttpLimits(hosts_of()))
    headers = {"host": "rebound.example:8000", "sec-fetch-site": "same-origin"}
    client = TestClient(app)
    changed = client.put("/v1/admin/speculation", json={"mode": "off"}, headers=headers)
    assert changed.status_code == 421


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost.", "app.localhost:80"),
        *("127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fd00::5]"),  # a kubelet uses the pod's IP
        socket.gethostname(),
    ],
)
def test_addresses_and_the_names_of_this_machine_are_allowed(host):
    hosts_of().check(host)


@pytest.mark.parametrize(
    "host",
    ["rebound.example", "127.0.0.1.rebound.example", "localhost.example", "evillocalhost", "", "*"],
)
def test_other_names_are_not_allowed(host):
    with pytest.raises(UnknownHostError):
        hosts_of().check(host)


def test_configured_names_are_allowed_beside_the_defaults():
    hosts = hosts_of(allowed_hosts="llm.example.com, *.Internal", host="node-7.lan")
    for host in (
        "llm.example.com:443",
        "a.b.internal",
        "LLM.example.com",
        "localhost",
        "node-7.lan",
    ):
        hosts.check(host)
    for host in ("internal", "xinternal", "example.com"):
        with pytest.raises(UnknownHostError):
            hosts.check(host)


def test_api_keys_or_a_star_allow_every_name():
    hosts_of(has_keys=True).check("rebound.example")
    hosts_of(allowed_hosts="*").check("rebound.example")
    with pytest.raises(UnknownHostError):
        hosts_of(has_keys=True, allowed_hosts="llm.example.com").check("rebound.example")


def test_a_second_host_header_does_not_hide_the_first():
    client = TestClient(application(hosts_of()), base_url="http://localhost")
    headers = [("host", "rebound.example"), ("host", "localhost")]
    assert client.get("/ready", headers=headers).status_code == 421


async def test_a_forwarded_request_is_checked_where_it_arrived_only():
    headers = ((b"host", b"llm.example.com"),)
    request = ForwardedRequest("GET", "/ready", b"", headers, b"")
    head = await anext(answer(application(hosts_of()), request))
    assert head.status == 200
