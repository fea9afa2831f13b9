"""The tensor-parallel group of shard actors, as the engine's target."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import zmq
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import wire
from cluster.resources import CPUS_PER_SHARD
from cluster.shard import ShardSpec, TargetShard
from cluster.transport import Connection, CurveKeys, Transport
from specdec.config import DTypeName, EngineConfig, QuantizationMethod
from specdec.errors import TargetFailedError
from specdec.step import StepInput, VerifyOutput

_LIVENESS_CHECK_PERIOD_MS = 500
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TargetSpec:
    """The model, and how to divide and reach it."""

    model_directory: Path
    dtype: DTypeName
    quantization: QuantizationMethod | None
    tensor_parallel_size: int
    engine: EngineConfig
    num_threads: int
    transport: Transport | None  # None: ipc on this node, tcp to another
    step_timeout_s: float


class ShardGroup:
    """Starts the shards, fans steps out to them, and collects rank 0's answer.

    A rank that reports an error, dies, or lets the deadline pass loses the group: every call from
    then on raises TargetFailedError, and `close` kills what is left.
    """

    def __init__(self, spec: TargetSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm. `placement` holds the shards in its second bundle."""
        self._spec = spec
        self._directory = Path(tempfile.mkdtemp(prefix="specdec-group-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._connections: list[Connection] = []
        self._runs: list[Any] = []
        self._deadline_s = 0.0
        self._step_id = -1
        self._shards = [self._start_shard(rank, placement) for rank in range(self._size)]
        try:
            self._connect()
            self._runs = [shard.run.remote() for shard in self._shards]
            self._wait_until_warm()
        except BaseException:
            self.close()
            raise

    def begin(self, step: StepInput) -> None:
        """Sends a step to every rank; its deadline runs from now."""
        frames = wire.encode_step(step)
        self._step_id = step.step_id
        self._deadline_s = time.monotonic() + self._spec.step_timeout_s
        for connection in self._connections:
            connection.socket.send_multipart(frames, copy=False)

    def collect(self) -> VerifyOutput:
        """Waits for rank 0's answer; raises TargetFailedError as the class says."""
        while not (ready := self._poller.poll(_LIVENESS_CHECK_PERIOD_MS)):
            self.check_alive()
            if time.monotonic() > self._deadline_s:
                limit = self._spec.step_timeout_s
                raise TargetFailedError(f"the target did not finish a step within {limit} s")
        socket, _ = ready[0]
        rank = next(r for r, c in enumerate(self._connections) if c.socket is socket)
        try:
            output = wire.decode_output(socket.recv_multipart())
        except wire.ShardError as error:
            raise TargetFailedError(f"rank {rank} failed: {error}") from error
        assert output.step_id == self._step_id, "an answer to another step"
        return output

    def close(self) -> None:
        """Ends every shard: by message where it listens, by force where it does not."""
        for connection in self._connections:
            with suppress(zmq.Again):  # a shard that is gone cannot be told
                connection.socket.send_multipart(wire.STOP, flags=zmq.NOBLOCK)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_STOP_TIMEOUT_S)
        for shard in self._shards:
            ray.kill(shard)
        for connection in self._connections:
            connection.socket.close()
        self._connections = []
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _size(self) -> int:
        return self._spec.tensor_parallel_size

    def _start_shard(self, rank: int, placement: PlacementGroup | None) -> Any:
        strategy = (
            "DEFAULT"
            if placement is None
            else PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=1)
        )
        actor = ray.remote(TargetShard).options(
            num_cpus=CPUS_PER_SHARD,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        spec = self._spec
        return actor.remote(
            ShardSpec(
                rank=rank,
                size=self._size,
                model_directory=spec.model_directory,
                dtype=spec.dtype,
                quantization=spec.quantization,
                engine=spec.engine,
                rendezvous=self._directory / "rendezvous",
                num_threads=spec.num_threads,
            )
        )

    def _wait_until_warm(self) -> None:
        """Sends an empty step: it is answered after warm-up, in which every rank takes part."""
        self.begin(StepInput(-1, (), (), (), ()))
        self._deadline_s = math.inf  # loading takes what it takes; a rank that ends is noticed
        self.collect()

    def _connect(self) -> None:
        keys = CurveKeys.generate()
        own_address = ray.util.get_node_ip_address()
        addresses = ray.get([shard.node_address.remote() for shard in self._shards])
        transports = [
            self._spec.transport or ("ipc" if address == own_address else "tcp")
            for address in addresses
        ]
        endpoints = ray.get(
            [
                shard.bind.remote(transport, keys.public)
                for shard, transport in zip(self._shards, transports, strict=True)
            ]
        )
        for endpoint in endpoints:
            connection = Connection(self._context, endpoint, keys)
            self._poller.register(connection.socket, zmq.POLLIN)
            self._connections.append(connection)

    def check_alive(self) -> None:
        """Raises TargetFailedError if a rank has ended. May be called from any thread."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        if ended:
            rank = self._runs.index(ended[0])
            raise TargetFailedError(f"rank {rank} of the target ended{_reason(ended[0])}")


def _reason(ended: Any) -> str:
    """What a shard's `run` raised, if it raised anything."""
    try:
        ray.get(ended)
    except RayTaskError as error:
        return f": {error.cause}"
    except RayError as error:
        return f": {type(error).__name__}"
    return ""
