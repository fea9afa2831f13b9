"""A replica and its embedded ingress: both servers on real ports, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from cluster.api.base.authentication import AdminAccess, ApiKey, ApiKeys
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.grpc.servicers import AdminServicer, InferenceServicer
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import make_app
from cluster.api.ingress import EmbeddedIngress
from tests.cluster.admin_service import operator_service
from tests.cluster.replica_on_hash_target import Replica, running_replica
from tests.e2e.conftest import free_ports


@dataclass(frozen=True)
class Served:
    """The replica and the addresses of its servers."""

    replica: Replica
    grpc_address: str
    http_url: str
    ingress: EmbeddedIngress


@asynccontextmanager
async def running_ingress(
    model: Path,
    state_dir: Path,
    keys: Sequence[ApiKey] = (),
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve a replica with these API keys and settings of ServeConfig, and no admin token."""
    grpc_port, http_port = free_ports(2)
    async with running_replica(model, state_dir) as replica:
        ports = {"grpc_port": grpc_port, "http_port": http_port}
        config = replace(replica.router.config, **ports, **settings)
        api_keys = ApiKeys(keys)
        replica.router.text.load()
        operators = operator_service(replica.link, AdminAccess(None, api_keys))
        budget = ByteBudget(inf)
        limits = HttpLimits.of(config, has_keys=bool(keys), budget=budget)
        app = make_app(
            lambda: replica.router,
            lambda: operators,
            lambda: api_keys,
            lambda: limits,
            has_peers=False,
        )
        inference = InferenceServicer(replica.router, api_keys, budget=budget)
        admin = AdminServicer(operators, budget)
        ingress = EmbeddedIngress(app, inference, admin, operators.access, config)
        await ingress.start()
        try:
            grpc_address, http_url = f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}"
            yield Served(replica, grpc_address, http_url, ingress)
        finally:
            await ingress.close()
