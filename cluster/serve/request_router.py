"""Request routers of Ray Serve, by the setting `routing_policy`.

Serve makes one in each process that sends requests to replicas, above all in its proxies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.api.base.routing_hint import RoutingHint
from cluster.config.replicas import RoutingPolicy
from cluster.serve.replica_choice import ReplicaChooser

KV_CACHE_TOKENS = "kv_cache_tokens"
"""The capacity of its prefix cache, which a replica reports as a routing statistic."""


def request_router_config(policy: RoutingPolicy) -> RequestRouterConfig:
    """Return the configuration of the request routers of a deployment."""
    if policy == "power_of_two":  # Serve's default
        return RequestRouterConfig()
    routers = {"prefix": PrefixRequestRouter, "random": RandomRequestRouter}
    return RequestRouterConfig(request_router_class=f"{__name__}.{routers[policy].__name__}")


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """Sends a request to a replica that has computed its prefix (`ReplicaChooser`).

    Requests without a hint, such as those for metrics, go to the replica of two random ones that
    has fewer open requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Pass everything to Serve's base class."""
        super().__init__(*args, **kwargs)
        self._chooser = ReplicaChooser(time.monotonic)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See RequestRouter; Serve also calls this when statistics of a replica have changed."""
        self._chooser.set_replicas({_name(each): _capacity(each) for each in replicas})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See RequestRouter."""
        super().on_replica_actor_died(replica_id)
        replicas: Iterable[RunningReplica] = self.curr_replicas.values()
        self._chooser.set_replicas({_name(each): _capacity(each) for each in replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of candidates: the chosen replica, then the others in case it is full."""
        hint = None
        if pending_request is not None:
            hint = RoutingHint.decode(pending_request.metadata.session_id)
        if pending_request is None or hint is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        name = self._chooser.choose(pending_request.metadata.internal_request_id, hint)
        chosen = [each for each in candidate_replicas if _name(each) == name]
        return [chosen, [each for each in candidate_replicas if _name(each) != name]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """See RequestRouter."""
        self._chooser.move(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See RequestRouter."""
        self._chooser.complete(internal_request_id, replica_id.unique_id)


class RandomRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """Sends each request to a random replica: the baseline of measurements."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica."""
        return [[random.choice(candidate_replicas)]]


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)


def _capacity(replica: RunningReplica) -> int | None:
    capacity = replica.routing_stats.get(KV_CACHE_TOKENS)
    return capacity if isinstance(capacity, int) else None
