# Modules: cluster.api.front_ends.front_ends, cluster.api.front_ends.process
"""Front ends in processes of their own, of a Router on a target without a model."""

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.front_ends import fork_server
from cluster.api.front_ends import front_ends as module
from cluster.api.front_ends.front_ends import FrontEnds, reserve
from cluster.api.front_ends.shared_counters import SharedCounters
from cluster.api.grpc import forwarding
from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http import forwarding as http_forwarding
from cluster.api.http_app import make_app
from specdec.client import AdminClient, AsyncClient
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.admin_service import operator_service
from tests.cluster.ipv6 import NEEDS_IPV6
from tests.e2e.conftest import free_ports

BODY = {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": 20, "temperature": 0}


def front_end_processes():
    return [each for parent in fork_servers() for each in parent.children()]


def fork_servers():
    return [
        each
        for each in psutil.Process().children()
        if "cluster.api.front_ends.process" in each.cmdline()
    ]


def speculation(grpc_address):
    with AdminClient(grpc_address) as client:
        return client.get_speculation()


@pytest.fixture
async def service(replica):
    """Both addresses of a front end."""
    grpc_port, http_port = free_ports(2)
    router = replica.router
    config = replace(router.config, grpc_port=grpc_port, http_port=http_port)
    engine = router.running_engine().thread.config
    router.routed = replace(router.routed, config=config, engine=engine)
    operators = operator_service(replica.link)
    app = make_app(lambda: router, lambda: operators)
    methods = {
        "http": partial(http_forwarding.answer, app),
        "grpc": partial(forwarding.answer, AdminServicer(operators)),
    }
    front_ends = FrontEnds(router, methods, config, SharedCounters.create(2, 0))
    await front_ends.start()
    await front_ends.set_ready(True)
    yield f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}"
    await front_ends.close()
    assert not fork_servers()


async def test_a_front_end_serves_is_replaced_and_ends(replica, service, monkeypatch):
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    grpc_address, url = service
    own = (await replica.http.post("/v1/completions", json=BODY)).json()
    async with httpx.AsyncClient(base_url=url, timeout=100) as http:
        assert (await http.get("/ready")).status_code == 200
        through = (await http.post("/v1/completions", json=BODY)).json()
        assert through["choices"] == own["choices"]
        params = SamplingParams(temperature=0.0, max_tokens=20)
        async with AsyncClient(grpc_address) as client:
            answer = await client.generate([11, 12, 13], params)
            assert answer.choices[0].text == own["choices"][0]["text"]
        assert (await asyncio.to_thread(speculation, grpc_address)).version >= 0
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.SERVING

        [process] = front_end_processes()
        may_end, collect = threading.Event(), replica.target.collect
        replica.target.collect = lambda: (may_end.wait(60), collect())[1]
        streamed = {**BODY, "stream": True}
        try:
            async with http.stream("POST", "/v1/completions", json=streamed) as broken:
                process.kill()
                with pytest.raises(httpx.HTTPError):
                    await broken.aread()
        finally:
            may_end.set()
    async with httpx.AsyncClient(base_url=url, timeout=100) as http:  # waits in the same socket
        again = (await http.post("/v1/completions", json=BODY)).json()
    assert again["choices"] == own["choices"]
    assert front_end_processes() != [process]
    while sum(replica.router.metrics.counts.ended.values()) < 2:  # with those of the front end
        await asyncio.sleep(0.01)


async def test_front_ends_share_memory_and_outlive_what_forked_them(service, monkeypatch):
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    monkeypatch.setattr(fork_server, "_RESTART_S", 0.0)
    _, url = service
    [server], [process] = fork_servers(), front_end_processes()
    assert server.num_threads() == 1, "no thread may exist at a fork"
    assert process.memory_full_info().uss < server.memory_full_info().rss / 2
    async with httpx.AsyncClient(base_url=url, timeout=100) as http:
        server.kill()
        await asyncio.to_thread(server.wait)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        while not (found := fork_servers()):
            await asyncio.sleep(0.01)
        process.kill()
        with suppress(httpx.HTTPError):  # on the connection to the one that was killed
            await http.post("/v1/completions", json=BODY)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert fork_servers() == found
    assert front_end_processes() != [process]


def test_a_port_of_another_service_is_not_shared():
    taken = socket.create_server(("127.0.0.1", 0), reuse_port=True)
    with taken, pytest.raises(OSError, match="in use"):
        reserve("127.0.0.1", taken.getsockname()[1], 2)


@pytest.mark.parametrize(
    ("host", "is_for_ipv6_alone"),
    [
        ("127.0.0.1", None),
        pytest.param("::1", True, marks=NEEDS_IPV6),
        pytest.param("::", False, marks=NEEDS_IPV6),
        pytest.param("0::0", False, marks=NEEDS_IPV6),
    ],
)
def test_sockets_of_one_port_take_what_its_first_does(host, is_for_ipv6_alone):
    one, other = reserve(host, free_ports(1)[0], 2)
    assert one.getsockname() == other.getsockname()
    if is_for_ipv6_alone is not None:
        found = one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        assert bool(found) is is_for_ipv6_alone
    one.close(), other.close()
