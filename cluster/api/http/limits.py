"""Limits of the HTTP interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from cluster.api.base.byte_budget import ByteBudget
from cluster.api.http.origin import AllowedHosts
from cluster.config.serve_config import ServeConfig


@dataclass(frozen=True)
class HttpLimits:
    """Limits of requests before their content is examined."""

    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    max_body_bytes: int = ServeConfig.http_max_body_mib * 2**20
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(inf))

    @classmethod
    def of(cls, config: ServeConfig, *, has_keys: bool, budget: ByteBudget) -> HttpLimits:
        """Return the configured limits.

        has_keys: whether calls need an API key. budget: shared with gRPC.
        """
        hosts = AllowedHosts.of(config, has_keys=has_keys)
        return cls(hosts, config.http_max_body_mib * 2**20, budget)
