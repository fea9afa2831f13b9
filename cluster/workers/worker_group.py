"""A tensor-parallel group of shard actors: started together, reached by sockets, lost together."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import zmq
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.observability.logs import LogConfig
from cluster.workers import serialization
from cluster.workers.actor import DraftShard, ShardSpec, TargetShard
from cluster.workers.model_source import ModelSource
from cluster.workers.profile_messages import END, ProfileInbox, ShardOrder, is_report
from cluster.workers.profiling import WRITING_S
from cluster.workers.resources import CPUS_PER_SHARD
from cluster.workers.transport import CurveKeys, StepSocket, Transport, connect
from cluster.workers.unix_socket import PeerGoneError
from specdec.config.engine import DraftLimits, DTypeName, EngineConfig, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.text.vocab_map import VocabularyMap
from specdec.types.errors import DraftFailedError, TargetFailedError
from specdec.types.profile import WorkerProfile

_LIVENESS_CHECK_PERIOD_MS = 500
_STOP_TIMEOUT_S = 5.0

# By default a thread of OpenMP that has nothing to do keeps its core for some 16 ms, in case more
# work comes; what another rank, the Router or a client has to do waits, and so does the work itself
# where it needs a thread that one of those keeps from its core. On two cores that others wanted
# too, 120 small products took 4.5 s so, 0.7 s with 20000 rounds of spinning, and 0.2 s with these:
# some 0.1 ms, which still spans the gaps within a step.
BRIEF_SPINNING = {"GOMP_SPINCOUNT": "2000"}
"""Environment variables of every rank."""


@dataclass(frozen=True)
class GroupSpec:
    """A model, how to divide it, where to put its ranks and how to reach them.

    name: of the model's role, for messages. bundle_index: of the placement group.
    vocabulary: of a draft model, what it has in common with the target's where they differ.
    num_replicas: how many groups like this one may share the cores of a node.
    transport: None takes ipc on this node and tcp to another.
    """

    name: str
    model: ModelSource
    dtype: DTypeName
    device: str
    quantization: QuantizationMethod | None
    kernels: Kernels
    tensor_parallel_size: int
    limits: EngineConfig | DraftLimits
    num_replicas: int
    bundle_index: int
    transport: Transport | None
    start_timeout_s: float
    step_timeout_s: float
    logs: LogConfig
    vocabulary: VocabularyMap | None = None


@dataclass(frozen=True)
class _Answer:
    rank: int
    frames: serialization.Frames


class ShardGroup:
    """Starts the ranks, sends messages to all of them, and receives what they answer.

    A rank that reports an error, dies, or lets a deadline pass loses the group: every call from
    then on raises the error of its role, and `close` kills what is left.
    """

    def __init__(
        self,
        spec: GroupSpec,
        placement: PlacementGroup | None,
        shard: type[TargetShard | DraftShard],
        error: type[TargetFailedError | DraftFailedError],
        first_step: serialization.Frames,
    ) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not.

        shard, error: what the role's ranks are, and what is raised when one is lost. first_step: a
        message that every rank of the role answers, and that changes nothing.
        """
        self._spec = spec
        self._error = error
        self._directory = Path(tempfile.mkdtemp(prefix="specdec-group-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[StepSocket] = []  # of the ranks
        self._rank_of: dict[Any, int] = {}  # by what the poller knows of a socket
        self._shards: list[Any] = []
        self._runs: list[Any] = []
        self._deadline_s = math.inf
        self._profile: ProfileInbox | None = None
        self._early: deque[_Answer] = deque()  # that came before they were waited for
        try:
            self._start_shards(placement, shard)
            self._wait_until_warm(first_step)
        except BaseException:
            self.kill()
            raise

    def _start_shards(
        self, placement: PlacementGroup | None, shard: type[TargetShard | DraftShard]
    ) -> None:
        spec = self._spec
        actor = ray.remote(shard).options(
            num_cpus=CPUS_PER_SHARD,
            num_gpus=0 if spec.device == "cpu" else 1,
            max_restarts=0,
            runtime_env={"env_vars": BRIEF_SPINNING},
            scheduling_strategy=_strategy(placement, spec.bundle_index),
        )
        for rank in range(spec.tensor_parallel_size):
            self._shards.append(actor.remote(self._shard_spec(rank)))

    def _wait_until_warm(self, first_step: serialization.Frames) -> None:
        """Connects, and returns when `first_step` is answered: after warm-up of every rank.

        A rank that ends meanwhile is noticed; so is one that is never placed, or never done, when
        `start_timeout_s` is over.
        """
        deadline_s = time.monotonic() + self._spec.start_timeout_s
        try:
            self._connect(self._spec.start_timeout_s)
        except GetTimeoutError as error:
            limit = self._spec.start_timeout_s
            raise self._error(f"the {self._spec.name} was not placed within {limit} s") from error
        self._runs = [shard.run.remote() for shard in self._shards]
        self.send(first_step)
        self._deadline_s = deadline_s
        self.receive()

    def send(self, frames: serialization.Frames) -> None:
        """Sends a step to every rank; its deadline runs from now, or from the answer before."""
        self._set_deadline()
        self._send_to_all(frames)

    def receive(self) -> serialization.Frames:
        """Waits for the next answer; raises the role's error as the class says."""
        while not self._early:
            if self._read(_LIVENESS_CHECK_PERIOD_MS):
                continue
            self.check_alive()
            if time.monotonic() > self._deadline_s:
                raise self._error(f"the {self._spec.name} did not answer in time")
        answer = self._early.popleft()
        self._set_deadline()  # of the next one, if it was sent already
        if (reason := serialization.error_in(answer.frames)) is not None:
            raise self._error(f"rank {answer.rank} of the {self._spec.name} failed: {reason}")
        return answer.frames

    def _set_deadline(self) -> None:
        self._deadline_s = time.monotonic() + self._spec.step_timeout_s
        if self._profile is not None and not self._profile.is_complete:
            self._deadline_s += WRITING_S  # traces are written between steps

    @property
    def has_answer(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        while self._read(0):
            pass
        return bool(self._early) or time.monotonic() > self._deadline_s

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._shards)

    def begin_profile(self, order: ShardOrder) -> None:
        """Has every rank begin a profile, after the steps that were sent to it."""
        self._profile = ProfileInbox(order, self.num_ranks)
        self._send_to_all(order.encode())

    def end_profile(self) -> None:
        """Has the ranks end their profile that have not."""
        self._send_to_all(END)

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """The profile of every rank; None until all have come. Does not wait."""
        assert self._profile is not None, "no profile was begun"
        while self._read(0):
            pass
        return self._profile.reports

    def _send_to_all(self, frames: serialization.Frames) -> None:
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send(frames)
            except PeerGoneError:
                continue  # why will be known to who waits for the answer
            except TimeoutError as error:
                message = f"rank {rank} of the {self._spec.name} takes no message"
                raise self._error(message) from error

    def _read(self, timeout_ms: int) -> bool:
        """Takes in one message, if one comes in time: an answer, or the report of a profile."""
        ready = self._poller.poll(timeout_ms)
        if not ready:
            return False
        pollable, _ = ready[0]
        rank = self._rank_of[pollable]
        try:
            frames = self._sockets[rank].receive()
        except PeerGoneError:
            self._poller.unregister(pollable)  # it would be ready for ever
            return False
        except TimeoutError as error:
            message = f"rank {rank} of the {self._spec.name} stopped within a message"
            raise self._error(message) from error
        if not is_report(frames):
            self._early.append(_Answer(rank, frames))
        elif self._profile is not None:
            self._profile.take(frames)
        return True

    def check_alive(self) -> None:
        """Raises the role's error if a rank has ended or is cut off. For any thread."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        if ended:
            rank = self._runs.index(ended[0])
            reason = _reason(ended[0])
            raise self._error(f"rank {rank} of the {self._spec.name} ended{reason}")
        for rank, socket in enumerate(tuple(self._sockets)):
            if socket.is_lost:
                raise self._error(f"rank {rank} of the {self._spec.name} cannot be reached")

    def close(self) -> None:
        """Ends every shard: by message where it listens, by force where it does not."""
        for socket in self._sockets:
            socket.send_last(serialization.STOP)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Ends every shard at once, as when one of them is lost."""
        for shard in self._shards:
            ray.kill(shard)
        for socket in self._sockets:
            socket.close()
        self._sockets = []
        self._poller = zmq.Poller()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _shard_spec(self, rank: int) -> ShardSpec:
        spec = self._spec
        return ShardSpec(
            rank=rank,
            size=spec.tensor_parallel_size,
            model=spec.model,
            dtype=spec.dtype,
            device=spec.device,
            quantization=spec.quantization,
            kernels=spec.kernels,
            limits=spec.limits,
            directory=self._directory,
            num_replicas=spec.num_replicas,
            logs=spec.logs,
            vocabulary=spec.vocabulary,
        )

    def _connect(self, timeout_s: float) -> None:
        keys = CurveKeys.generate()
        own_address = ray.util.get_node_ip_address()
        addresses = ray.get(
            [shard.node_address.remote() for shard in self._shards], timeout=timeout_s
        )
        transports = [
            self._spec.transport or ("ipc" if address == own_address else "tcp")
            for address in addresses
        ]
        endpoints = ray.get(
            [
                shard.bind.remote(transport, keys.public)
                for shard, transport in zip(self._shards, transports, strict=True)
            ],
            timeout=timeout_s,
        )
        for rank, endpoint in enumerate(endpoints):
            socket = connect(self._context, endpoint, keys, self._spec.step_timeout_s)
            self._sockets.append(socket)
            self._poller.register(socket.pollable, zmq.POLLIN)
            self._rank_of[socket.pollable] = rank


def _strategy(placement: PlacementGroup | None, bundle_index: int) -> Any:
    if placement is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle_index)


def _reason(ended: Any) -> str:
    """What a shard's `run` raised, if it raised anything."""
    try:
        ray.get(ended)
    except RayTaskError as error:
        return f": {error.cause}"
    except RayError as error:
        return f": {type(error).__name__}"
    return ""
