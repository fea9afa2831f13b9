"""A real Envoy that calls the endpoint picker for each request."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.conftest import START_TIMEOUT_S, free_ports

ENVIRONMENT = Path(__file__).parents[2] / ".make" / "envoy"
ENVOY = ENVIRONMENT / "bin" / "envoy"
DESTINATION = "x-gateway-destination-endpoint"
BY_HEADER = "by-header"
"""Header of requests that are routed by DESTINATION instead of by metadata."""

RETRY_ON = "connect-failure,reset-before-request"
_UP = "endpoint_picker_endpoint_up{.*} 1"
_TYPES = "type.googleapis.com/envoy.extensions"


@dataclass(frozen=True)
class Gateway:
    """Addresses of a running Envoy: one for each mode of bodies.

    buffered: bodies of requests at once, and of responses not at all.
    """

    full_duplex: str
    buffered: str
    picker: subprocess.Popen[bytes]
    picker_metrics: str


@contextmanager
def running_gateway(
    directory: Path, endpoints: Sequence[str], *flags: str, may_fail: bool = False
) -> Iterator[Gateway]:
    """Run Envoy and a picker for the block. may_fail: requests pass without the picker."""
    picker_port, metrics_port, *ports = free_ports(4)
    config = directory / "envoy.yaml"
    config.write_text(yaml.safe_dump(bootstrap(ports, picker_port, endpoints, may_fail=may_fail)))
    picker = [sys.executable, "-m", "cluster", "endpoint-picker", "--log-level", "debug"]
    picker += ["--endpoints", ",".join(endpoints), "--port", str(picker_port), *flags]
    picker += ["--metrics-port", str(metrics_port)]
    envoy = [str(ENVOY), "-c", str(config), "--concurrency", "1", "--log-level", "warning"]
    with ExitStack() as stack:
        log = directory / "picker.log"
        picking = stack.enter_context(_running(picker, log))
        metrics, *urls = (f"http://127.0.0.1:{port}" for port in (metrics_port, *ports))
        _wait_for(metrics, len(endpoints), log)
        log = directory / "envoy.log"
        stack.enter_context(_running([*envoy, "--use-dynamic-base-id"], log))
        for url in urls:
            _wait_for(url, 0, log)
        yield Gateway(*urls, picking, metrics)


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        popen = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield popen
    finally:
        popen.terminate()
        popen.wait(60)


def _wait_for(url: str, num_up: int, log: Path) -> None:
    """Wait until /metrics is answered, and has this many endpoints that are up."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            answer = httpx.get(f"{url}/metrics")
            if answer.status_code == 200 and len(re.findall(_UP, answer.text)) == num_up:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)


def bootstrap(
    ports: Sequence[int], picker_port: int, endpoints: Sequence[str], *, may_fail: bool
) -> dict[str, Any]:
    """Return Envoy's configuration, with a listener for each mode of bodies."""
    modes = ("FULL_DUPLEX_STREAMED", "BUFFERED")
    return {
        "static_resources": {
            "listeners": [
                _listener(port, mode, may_fail=may_fail)
                for port, mode in zip(ports, modes, strict=True)
            ],
            "clusters": [_pool(endpoints), _by_header(), _picker(picker_port)],
        }
    }


def _listener(port: int, mode: str, *, may_fail: bool) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": mode.lower(),
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/", "headers": [{"name": BY_HEADER}]},
                            "route": {"cluster": BY_HEADER},
                        },
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "pool",
                                "timeout": "0s",
                                "retry_policy": {"retry_on": RETRY_ON, "num_retries": 2},
                            },
                        },
                    ],
                }
            ]
        },
        "http_filters": [
            _ext_proc(mode, may_fail=may_fail),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            },
        ],
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {"address": _address(port), "filter_chains": [{"filters": [network]}]}


def _ext_proc(mode: str, *, may_fail: bool) -> dict[str, Any]:
    trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    response_mode = mode if mode == "FULL_DUPLEX_STREAMED" else "NONE"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "failure_mode_allow": may_fail,
            "message_timeout": "60s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": mode,
                "response_body_mode": response_mode,
                "request_trailer_mode": trailers,
                "response_trailer_mode": trailers,
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _pool(endpoints: Sequence[str]) -> dict[str, Any]:
    """Return the cluster of the endpoints; without a choice it takes them in turn."""
    host_of = {"@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost"}
    round_robin = {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"}
    in_turn = {"name": "round_robin", "typed_config": round_robin}
    metadata = {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
    override = {
        **host_of,
        "override_host_sources": [{"metadata": metadata}],
        "fallback_policy": {"policies": [{"typed_extension_config": in_turn}]},
    }
    policy = {"name": "override_host", "typed_config": override}
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "20s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": _assignment("pool", [int(each.split(":")[1]) for each in endpoints]),
    }


def _by_header() -> dict[str, Any]:
    """Return a cluster that connects to any address in the header, as some gateways do."""
    return {
        "name": BY_HEADER,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "20s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _picker(port: int) -> dict[str, Any]:
    options = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "20s",
        "typed_extension_protocol_options": {name: options},
        "load_assignment": _assignment("picker", [port]),
    }


def _assignment(name: str, ports: Sequence[int]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
