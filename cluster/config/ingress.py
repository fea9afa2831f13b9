"""Settings of the servers that accept requests: ports, TLS, and the Ray cluster that they join."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config.draft_workers import DraftWorkersConfig
from cluster.config.network import HOSTS, is_loopback
from specdec.config.fields import FILE, TEXT, one_of, optional, setting, whole_number
from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class IngressConfig(DraftWorkersConfig):
    """Configuration of a model with the servers that accept its requests."""

    ingress: Literal["embedded", "serve"] = setting(
        "embedded",
        one_of("embedded", "serve"),
        "Servers that accept requests: embedded starts them in the only replica, serve uses Ray "
        "Serve's proxies and allows several replicas",
    )
    host: str = setting("127.0.0.1", TEXT, "Host or address to listen on")
    allowed_hosts: str | None = setting(
        None,
        HOSTS,
        "Host names that HTTP requests may be addressed to, separated by commas; *.example.com "
        "allows all names below a domain, * allows every name. Addresses, names of loopback, the "
        "name of this machine and host are always allowed",
        "every name if there are API keys, otherwise none besides these",
    )
    grpc_port: int = setting(9000, whole_number(1, 65535), "Port of the gRPC API")
    http_port: int = setting(8000, whole_number(1, 65535), "Port of the HTTP API")
    grpc_max_message_mib: int = setting(
        16, whole_number(1, 1024), "Maximum size of a gRPC message, in MiB"
    )
    http_max_body_mib: int = setting(
        16, whole_number(1, 1024), "Maximum size of the body of an HTTP request, in MiB"
    )
    max_inflight_mib: int = setting(
        128,
        whole_number(1, 2**20),
        "Maximum size of all gRPC messages and HTTP bodies together that a replica, or a proxy of "
        "Serve, holds at a time, in MiB; more are rejected, except those of up to 64 KiB",
    )
    tls_cert_file: Path | None = setting(
        None, FILE, "TLS certificate chain, as a PEM file", "no TLS"
    )
    tls_key_file: Path | None = setting(
        None, FILE, "Private key of the TLS certificate, as a PEM file", "no TLS"
    )
    ray_address: str | None = setting(
        None,
        optional(TEXT),
        "Address of an existing Ray cluster, as host:port of its head or auto; needs --ingress "
        "serve",
        "starts a local Ray instance",
    )

    @property
    def is_reachable(self) -> bool:
        """Return whether other machines can connect to the service."""
        return self.ingress == "serve" or not is_loopback(self.host)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Insecure settings that the operator should know of, one line each."""
        if self.ray_address is not None:
            return ("Ray Serve's gRPC ingress listens on all interfaces of the nodes without TLS",)
        is_open = self.tls_cert_file is None and not is_loopback(self.host)
        return (f"{self.host} is reachable from other machines, and TLS is off",) if is_open else ()

    def _check_together(self) -> None:
        super()._check_together()
        if self.grpc_port == self.http_port:
            limit = f"different from grpc_port ({self.grpc_port})"
            raise InvalidValueError("http_port", self.http_port, limit)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            limit = "given together with tls_cert_file, or not at all"
            raise InvalidValueError("tls_key_file", self.tls_key_file, limit)
        if self.ingress == "embedded":
            self._check_embedded()
        elif self.tls_cert_file is not None:
            limit = "left out unless ingress is embedded"
            raise InvalidValueError("tls_cert_file", str(self.tls_cert_file), limit)

    def _check_embedded(self) -> None:
        """Check that one replica has the servers, on a known machine."""
        limit = None
        if self.max_replicas or self.num_replicas > 1:
            limit = "for several replicas: embedded servers would all listen on the same ports"
        elif self.ray_address is not None:
            limit = "where ray_address is given: embedded servers could start on any of its nodes"
        if limit is not None:
            raise InvalidValueError("ingress", self.ingress, f"serve {limit}")
