"""`specdec endpoint-picker`: chooses replicas for an Envoy proxy, without Ray."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from cluster.cli.errors import exits_as_unusable
from cluster.cli.output import SectionedCommand, combine_flags, section_flag
from cluster.config.secrets import API_KEY_VARIABLE

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT = click.IntRange(1, 65535)

_endpoint_flag = partial(section_flag, "Endpoints")
_choice_flag = partial(section_flag, "Choice")
_network_flag = partial(section_flag, "Network")

_flags = combine_flags(
    _endpoint_flag("--endpoints", help="HTTP addresses of replicas: IP:PORT,..."),
    _endpoint_flag(
        "--pod-selector",
        default="",
        help="Label selector of the replicas' pods, such as app=chat, in place of --endpoints.",
    ),
    _endpoint_flag("--pod-port", type=_PORT, default=8000, help="HTTP port of the pods."),
    _endpoint_flag("--namespace", help="Namespace of the pods. Default: that of this."),
    _endpoint_flag(
        "--metrics-path",
        default="/metrics/replica",
        help="Path of their metrics. Default: /metrics/replica; /metrics for other servers.",
    ),
    _endpoint_flag(
        "--scrape-interval-ms",
        type=click.IntRange(20, 10_000),
        default=100,
        help="Time between two scrapes of an endpoint. Default: 100.",
    ),
    _endpoint_flag(
        "--endpoint-ca-file",
        type=_FILE,
        help="CA certificates in PEM of endpoints with TLS. Default: plain HTTP.",
    ),
    _choice_flag(
        "--max-waiting",
        type=click.IntRange(min=1),
        help="Refuse requests with 429 while every replica has this many in its queue. Default: "
        "no limit.",
    ),
    _choice_flag(
        "--num-fallbacks",
        type=click.IntRange(0, 8),
        default=0,
        help="Further endpoints to send to the proxy, for its retries; it must support lists. "
        "Default: 0.",
    ),
    _choice_flag(
        "--slo",
        help='Objective in milliseconds, "ttft:2000 tpot:40": choose by expected goodput, and '
        "count the replicas that it needs, as KEDA's external scaler. Default: by tokens.",
    ),
    _network_flag("--host", default="127.0.0.1", help="Address. Default: 127.0.0.1."),
    _network_flag("--port", type=_PORT, default=9002, help="Port of gRPC. Default: 9002."),
    _network_flag("--metrics-port", type=_PORT, help="Port of /metrics. Default: not served."),
    _network_flag(
        "--health-port",
        type=_PORT,
        help="Port of gRPC health checks without TLS. Default: only those of --port.",
    ),
    _network_flag(
        "--drain-timeout-s",
        type=click.FloatRange(0, 86_400),
        default=20.0,
        help="Seconds for open responses at a stop, where the proxy sends them in full duplex. "
        "Default: 20.",
    ),
    _network_flag("--tls-cert-file", type=_FILE, help="Certificate in PEM; changes are followed."),
    _network_flag("--tls-key-file", type=_FILE, help="Its private key in PEM."),
    _network_flag(
        "--tls-self-signed",
        is_flag=True,
        help="TLS with a new certificate, for gateways that do not verify it.",
    ),
)


@click.command(
    "endpoint-picker", cls=SectionedCommand, short_help="Choose replicas for an Envoy gateway."
)
@_flags
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Logging level. Default: info.",
)
def endpoint_picker(
    endpoints: str | None,
    metrics_path: str,
    scrape_interval_ms: int,
    endpoint_ca_file: Path | None,
    log_level: Any,
    **settings: Any,
) -> None:
    """Choose a replica for each request of an Envoy proxy, until Ctrl-C.

    It is an endpoint picker of Gateway API's inference extension: a gRPC server of Envoy's external
    processing protocol (docs/kubernetes.md). To find an adapter at other servers that require API
    keys, it needs one in $SPECDEC_API_KEY.
    """
    from cluster.api.endpoint_picker.scraper import ScrapeConfig
    from cluster.api.endpoint_picker.server import PickerConfig, serve
    from cluster.observability import logs

    scrape = ScrapeConfig(
        scrape_interval_ms / 1000,
        metrics_path,
        str(endpoint_ca_file or ""),
        os.environ.get(API_KEY_VARIABLE),
    )
    addresses = () if endpoints is None else tuple(map(str.strip, endpoints.split(",")))
    with exits_as_unusable():
        config = PickerConfig(endpoints=addresses, scrape=scrape, **settings)
        logs.configure(logs.LogConfig(log_level))
        asyncio.run(serve(config))
