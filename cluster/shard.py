"""The actors that hold one tensor-parallel rank of the target, or of the draft model."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import ray
import torch

from cluster import logs, wire
from cluster.logs import LogConfig
from cluster.resources import threads_per_shard
from cluster.shard_profile import ShardProfiling, is_about_profiles
from cluster.transport import Endpoint, Listener, Transport
from specdec.config import DraftLimits, DTypeName, EngineConfig, Kernels, QuantizationMethod
from specdec.parallel import TensorParallelGroup
from specdec.runner import (
    DraftRunner,
    ModelRunner,
    Rendezvous,
    Runner,
    load_draft_runner,
    load_runner,
)
from specdec.vocabulary import VocabularyMap

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Covers ranks that load at different speeds. The Router's deadline for a step is the short one."""


@dataclass(frozen=True)
class ShardSpec:
    """What a rank needs to know to become part of its group.

    device: its type; a rank sees one GPU at most, its own.
    limits: the engine's for a target, DraftLimits for a draft model.
    directory: for the files of this group, which its Router removes. Ranks are always on one node.
    vocabulary: of a draft model, what it has in common with the target's where they differ.
    num_replicas: how many groups like this one share the cores of the rank's node.
    """

    rank: int
    size: int
    model_directory: Path
    dtype: DTypeName
    device: str
    quantization: QuantizationMethod | None
    kernels: Kernels
    limits: EngineConfig | DraftLimits
    directory: Path
    num_replicas: int
    logs: LogConfig
    vocabulary: VocabularyMap | None = None


class _Shard(ABC):
    """One rank. It runs the steps that arrive on its socket, in order, until told to stop."""

    _runner: Runner  # from _load on

    def __init__(self, spec: ShardSpec) -> None:
        logs.configure(spec.logs)
        self._spec = spec
        self._listener: Listener | None = None

    def node_address(self) -> str:
        """The address of this rank's node, to choose a transport by."""
        return str(ray.util.get_node_ip_address())

    def bind(self, transport: Transport, peer_public_key: bytes) -> Endpoint:
        """Opens the step socket for the Router that owns this key."""
        self._listener = Listener(
            transport,
            self.node_address(),
            peer_public_key,
            self._spec.directory / f"rank-{self._spec.rank}",
        )
        return self._listener.endpoint

    def run(self) -> None:
        """Joins the group, loads, warms up, and serves steps until the stop message.

        Rank 0 answers; any rank reports its errors. All in one thread: OpenMP keeps a pool for
        each thread that asks for work, and lets pools beyond the cores wait asleep.
        """
        assert self._listener is not None, "run before bind"
        socket = self._listener.socket
        try:
            torch.set_num_threads(threads_per_shard(self._spec.size, self._spec.num_replicas))
            self._load(_join_group(self._spec))
            profiling = ShardProfiling(self._spec.rank, self._runner)
            while (frames := socket.recv_multipart()) != wire.STOP:
                try:
                    self._dispatch(frames, profiling)
                except Exception as error:
                    logger.exception("rank %d failed in a step", self._spec.rank)
                    message = f"{type(error).__name__}: {error}"
                    socket.send_multipart(wire.encode_error(message))
        finally:
            self._listener.close()

    def _dispatch(self, frames: wire.Frames, profiling: ShardProfiling) -> None:
        if is_about_profiles(frames):
            report = profiling.heed(frames)
        elif profiling.is_running:
            report = profiling.run_step(lambda: self._handle(frames))
        else:
            self._handle(frames)
            return
        if report is not None and self._listener is not None:
            self._listener.socket.send_multipart(report)

    def _answer(self, frames: wire.Frames) -> None:
        if self._spec.rank == 0 and self._listener is not None:
            self._listener.socket.send_multipart(frames)

    @abstractmethod
    def _load(self, group: TensorParallelGroup) -> None:
        """Makes the runner of this rank, and warms it up."""

    @abstractmethod
    def _handle(self, frames: wire.Frames) -> None:
        """Runs one step, and answers as its role does."""


class TargetShard(_Shard):
    """One rank of the target model: scores and verifies."""

    _runner: ModelRunner

    def _load(self, group: TensorParallelGroup) -> None:
        spec, limits = self._spec, self._spec.limits
        assert isinstance(limits, EngineConfig)
        self._runner = load_runner(
            spec.model_directory,
            spec.dtype,
            limits,
            group,
            spec.quantization,
            torch.device(spec.device),
            spec.kernels,
        )
        self._runner.warm_up(min(limits.max_num_batched_tokens, limits.max_model_len - 1))

    def _handle(self, frames: wire.Frames) -> None:
        self._answer(wire.encode_output(self._runner.execute(wire.decode_step(frames))))


class DraftShard(_Shard):
    """One rank of the draft model: drafts, and then catches up while the target works."""

    _runner: DraftRunner

    def _load(self, group: TensorParallelGroup) -> None:
        spec, limits = self._spec, self._spec.limits
        assert isinstance(limits, DraftLimits)
        self._runner = load_draft_runner(
            spec.model_directory,
            spec.dtype,
            limits,
            group,
            spec.quantization,
            torch.device(spec.device),
            spec.vocabulary,
            spec.kernels,
        )
        self._runner.warm_up(min(limits.max_catch_up_tokens, limits.max_model_len - 1))

    def _handle(self, frames: wire.Frames) -> None:
        step = wire.decode_draft_step(frames)
        drafts = self._runner.draft(step)
        if step.drafts:
            self._answer(wire.encode_draft_output(drafts))
        if step.rows:
            self._runner.catch_up(step)
        if step.rows or not step.drafts:
            self._answer(wire.CAUGHT_UP)


def _join_group(spec: ShardSpec) -> TensorParallelGroup:
    if spec.size == 1:
        return TensorParallelGroup()
    # All ranks of a group are on one node, so nothing of it needs to be on the network. Whoever
    # made up the path may be on another one.
    spec.directory.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = Rendezvous(
        spec.rank, spec.size, spec.device, spec.directory, _COLLECTIVE_TIMEOUT
    ).join()
    means = type(group.collectives).__name__
    logger.info("rank %d of %d exchanges tensors by %s", spec.rank, spec.size, means)
    return group
