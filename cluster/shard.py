"""The actor that holds one tensor-parallel rank of the target model."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from cluster import wire
from cluster.transport import Endpoint, Listener, Transport
from specdec.config import DTypeName, EngineConfig, QuantizationMethod
from specdec.parallel import TensorParallelGroup
from specdec.runner import ModelRunner, load_runner

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Covers ranks that load at different speeds. The Router's deadline for a step is the short one."""


@dataclass(frozen=True)
class ShardSpec:
    """What a rank needs to know to become part of its group.

    rendezvous: a file that the ranks of one group share; they are always on one node.
    num_threads: threads of this rank's tensor operations.
    """

    rank: int
    size: int
    model_directory: Path
    dtype: DTypeName
    quantization: QuantizationMethod | None
    engine: EngineConfig
    rendezvous: Path
    num_threads: int


class TargetShard:
    """One rank. It runs the steps that arrive on its socket, in order, until told to stop."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self._listener: Listener | None = None

    def node_address(self) -> str:
        """The address of this rank's node, to choose a transport by."""
        return str(ray.util.get_node_ip_address())

    def bind(self, transport: Transport, peer_public_key: bytes) -> Endpoint:
        """Opens the step socket for the Router that owns this key."""
        self._listener = Listener(transport, self.node_address(), peer_public_key)
        return self._listener.endpoint

    def run(self) -> None:
        """Joins the group, loads, warms up, and serves steps until the stop message.

        Rank 0 answers each step; any rank reports its errors. All in one thread: OpenMP keeps a
        pool for each thread that asks for work, and lets pools beyond the cores wait asleep.
        """
        assert self._listener is not None, "run before bind"
        try:
            runner = self._load()
            socket = self._listener.socket
            while (frames := socket.recv_multipart()) != wire.STOP:
                reply = self._execute(runner, frames)
                if reply is not None:
                    socket.send_multipart(reply)
        finally:
            self._listener.close()

    def _load(self) -> ModelRunner:
        spec = self._spec
        torch.set_num_threads(spec.num_threads)
        runner = load_runner(
            spec.model_directory, spec.dtype, spec.engine, _join_group(spec), spec.quantization
        )
        runner.warm_up(min(spec.engine.max_num_batched_tokens, spec.engine.max_model_len - 1))
        return runner

    def _execute(self, runner: ModelRunner, frames: wire.Frames) -> wire.Frames | None:
        step = wire.decode_step(frames)
        try:
            output = runner.execute(step)
        except Exception as error:
            logger.exception("rank %d failed in step %d", self._spec.rank, step.step_id)
            return wire.encode_error(step.step_id, f"{type(error).__name__}: {error}")
        return wire.encode_output(output) if self._spec.rank == 0 else None


def _join_group(spec: ShardSpec) -> TensorParallelGroup:
    if spec.size == 1:
        return TensorParallelGroup()
    # All ranks of a group are on one node, so nothing of it needs to be on the network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.rendezvous}",
        rank=spec.rank,
        world_size=spec.size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    return TensorParallelGroup(spec.rank, spec.size, dist.group.WORLD)
