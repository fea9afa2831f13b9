"""The Ray actors of a group's ranks: started with their sockets open, before they load a model."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ray
import zmq
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config.secrets import SECRET_VARIABLES
from cluster.workers.group_spec import GroupSpec, Peers, RankPlace
from cluster.workers.rank.actor import Worker
from cluster.workers.ray.resources import CPUS_PER_WORKER
from cluster.workers.transport.transport import CurveKeys, Endpoint, StepSocket, Transport, connect
from cluster.workers.transport.unix_socket import parent_of_sockets
from specdec.types.errors import SpecdecError

# By default an idle OpenMP thread spins for some 16 ms in case more work arrives. Other ranks, the
# Router and clients wait for that core, and so does the work itself where a thread that it needs is
# not scheduled. On two cores under contention, 120 small matrix products took 4.5 s that way, 0.7 s
# with a spin count of 20000, and 0.2 s with 2000: some 0.1 ms, longer than the gaps within a step.
BRIEF_SPINNING = {"GOMP_SPINCOUNT": "2000"}
RANK_ENVIRONMENT = {**BRIEF_SPINNING, **dict.fromkeys(SECRET_VARIABLES, "")}
"""Environment variables of every rank, which needs no key."""


@dataclass(frozen=True)
class RankLoss:
    """A rank that has ended. reason: continues a sentence. cause: its error, if meant for users."""

    rank: int
    reason: str
    cause: SpecdecError | None = None


class OpenRanks(Protocol):
    """Ranks with open sockets, to which a worker group can connect.

    are_shared: whether they also work for other engines.
    """

    are_shared: bool

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where they run; none where they are shared."""

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[StepSocket]:
        """Yield the Router's ends of the sockets, by rank. Raises OSError."""

    def loss(self) -> RankLoss | None:
        """Return a rank that is known to have ended, or None. From any thread."""

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait until all have ended that are to end, or for `timeout_s`."""

    def kill(self) -> None:
        """Kill every rank that works for this engine alone."""


class Ranks:
    """The actors of one group.

    Spares import everything at a low priority and wait; they load when a Router connects and sends
    a step, after the ranks that they replace have ended. They reserve nothing: the bundle of the
    group, in which they are placed, has the resources of the ranks that they replace.
    """

    are_shared = False

    def __init__(
        self,
        actor: type[Worker],
        spec: GroupSpec,
        placement: PlacementGroup,
        replaces: Sequence[RankPlace] = (),
    ) -> None:
        """Start the actors. Does not wait. replaces: by rank, for spares."""
        self._spec = spec
        self._directory = Path(tempfile.mkdtemp(prefix="specdec-group-", dir=parent_of_sockets()))
        self._keys = CurveKeys.generate()
        self._endpoints: list[Endpoint] = []
        self._prepared: list[Any] = []  # one reference a spare
        self._runs: list[Any] = []  # one reference a rank
        self._is_spare = bool(replaces)
        self._places: list[RankPlace] = []
        self._workers = [
            self._actor(actor, placement, bundle).remote(
                spec, rank, self._directory, replaces[rank] if replaces else None
            )
            for rank, bundle in enumerate(spec.bundles)
        ]

    def _actor(self, actor: type[Worker], placement: PlacementGroup, bundle: int) -> Any:
        """Return the actor's class with the options of a rank in this bundle."""
        spec = self._spec
        return ray.remote(actor).options(
            num_cpus=0 if self._is_spare else CPUS_PER_WORKER,
            num_gpus=0 if self._is_spare or spec.device == "cpu" else spec.gpus_per_rank,
            max_restarts=0,
            runtime_env={"env_vars": RANK_ENVIRONMENT},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement, placement_group_bundle_index=bundle
            ),
        )

    @classmethod
    def opened(
        cls,
        actor: type[Worker],
        spec: GroupSpec,
        placement: PlacementGroup,
        replaces: Sequence[RankPlace] = (),
    ) -> Ranks:
        """Return ranks with open sockets, or raise what `open` raises and leave no process.

        replaces: by rank, for spares.
        """
        ranks = cls(actor, spec, placement, replaces)
        try:
            ranks.open(spec.start_timeout_s)
        except BaseException:
            ranks.kill()
            raise
        return ranks

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where the ranks run, once they are open."""
        return self._places

    def open(self, timeout_s: float) -> None:
        """Wait until the actors are placed, and open their sockets. Raises TimeoutError."""
        opening = _Opening(timeout_s)
        places = [worker.place.remote() for worker in self._workers]
        self._places = opening.get(places, "was not placed")
        bound = [
            worker.bind.remote(self._transport(place.address), self._keys.public)
            for worker, place in zip(self._workers, self._places, strict=True)
        ]
        self._endpoints = opening.get(bound, "did not open its step sockets")
        peers = self._peers(opening)
        if self._is_spare:
            self._prepared = [worker.prepare.remote() for worker in self._workers]
            for worker in self._workers:
                worker.stand_by.remote()
        self._runs = [
            worker.run.remote(each) for worker, each in zip(self._workers, peers, strict=True)
        ]

    def _peers(self, opening: _Opening) -> list[Peers]:
        """Return by rank where the others are; ranks on several nodes begin to listen."""
        nodes = [place.node for place in self._places]
        peers = [Peers(nodes.count(each)) for each in nodes]
        if len(set(nodes)) == 1:
            return peers
        workers, missing = self._workers, "did not open the sockets between its ranks"
        keys = opening.get([each.open_peers.remote() for each in workers], missing)
        if self._spec.device == "cuda":
            [store] = opening.get([workers[0].open_store.remote()], missing)
            return [replace(each, store=store) for each in peers]
        found = opening.get([each.listen_for_peers.remote(keys) for each in workers], missing)
        return [
            replace(each, endpoints=tuple(found[other][rank - other - 1] for other in range(rank)))
            for rank, each in enumerate(peers)
        ]

    def poll_prepared(self) -> bool:
        """Return whether these are spares that have imported everything."""
        if not self._prepared:
            return False
        ready, _ = ray.wait(self._prepared, num_returns=len(self._prepared), timeout=0)
        return len(ready) == len(self._prepared)

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[StepSocket]:
        """Yield the Router's ends of the sockets, by rank. Raises OSError."""
        for endpoint in self._endpoints:
            yield connect(context, endpoint, self._keys, self._spec.step_timeout_s)

    def loss(self) -> RankLoss | None:
        """Return a rank that has ended, one with an error for users first, or None.

        From any thread.
        """
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        if not ended:
            return None
        run = next((each for each in ended if _exit_cause(each) is not None), ended[0])
        return RankLoss(self._runs.index(run), f"ended{exit_reason(run)}", _exit_cause(run))

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait until all have ended, or for `timeout_s`."""
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)

    def kill(self) -> None:
        """Kill every rank, and remove the sockets."""
        for worker in self._workers:
            ray.kill(worker)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _transport(self, address: str) -> Transport:
        own_address = ray.util.get_node_ip_address()
        return self._spec.transport or ("ipc" if address == own_address else "tcp")


class _Opening:
    """Calls of actors in several phases, which have one deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at_s = time.monotonic() + timeout_s

    def get(self, calls: Sequence[Any], missing: str) -> list[Any]:
        """Return the results of a phase; raise TimeoutError that begins with what is missing."""
        left_s = max(0.0, self._ends_at_s - time.monotonic())
        try:
            results: list[Any] = ray.get(calls, timeout=left_s)
        except GetTimeoutError as error:
            raise TimeoutError(f"{missing} within {self._timeout_s} s") from error
        return results


def exit_reason(run: Any) -> str:
    """Return the error that ended a rank's `run`, or an empty string."""
    try:
        ray.get(run)
    except RayTaskError as error:
        return f": {error.cause}"
    except RayError as error:
        return f": {type(error).__name__}"
    return ""


def _exit_cause(run: Any) -> SpecdecError | None:
    """Return the SpecdecError that ended a rank's `run`, if it was one."""
    try:
        ray.get(run)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, SpecdecError) else None
    except RayError:
        return None
    return None
