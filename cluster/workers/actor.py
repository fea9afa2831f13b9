"""The actors that hold one tensor-parallel rank of the target, or of the draft model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster.observability import logs
from cluster.observability.logs import LogConfig
from cluster.workers import serialization
from cluster.workers.cpu_scheduling import run_as_model
from cluster.workers.model_source import ModelSource
from cluster.workers.profile_messages import is_report
from cluster.workers.transport import Endpoint, Listener, StepSocket, Transport
from cluster.workers.unix_socket import PeerGoneError
from specdec.config.engine import DraftLimits, DTypeName, EngineConfig, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.text.vocab_map import VocabularyMap

if TYPE_CHECKING:  # torch is for the actors alone, not for the Router that starts them
    from cluster.workers.rank import Rank

logger = logging.getLogger(__name__)


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
    model: ModelSource
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

    def __init__(self, spec: ShardSpec) -> None:
        logs.configure(spec.logs)
        self._spec = spec
        self._listener: Listener | None = None
        self._has_failed = False  # so that what follows would not be what its peers run

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

        Rank 0 answers; any rank reports its errors and profiles, and runs nothing behind a step
        that failed: the group is ended as a whole. All in one thread: OpenMP keeps a
        pool for each thread that asks for work, and lets pools beyond the cores wait asleep.
        """
        assert self._listener is not None, "run before bind"
        run_as_model()
        try:
            socket = self._listener.accept()
            rank = self._load()
            while (frames := socket.receive()) != serialization.STOP:
                if not self._has_failed:
                    self._run_step(rank, frames, socket)
        except PeerGoneError:
            logger.info("rank %d ends: its Router has", self._spec.rank)
        finally:
            self._listener.close()

    def _run_step(self, rank: Rank, frames: serialization.Frames, socket: StepSocket) -> None:
        try:
            for answer in rank.run(frames):
                if self._spec.rank == 0 or is_report(answer):
                    socket.send(answer)
        except PeerGoneError:
            raise
        except Exception as error:
            self._has_failed = True
            logger.exception("rank %d failed in a step", self._spec.rank)
            socket.send(serialization.encode_error(f"{type(error).__name__}: {error}"))

    @abstractmethod
    def _load(self) -> Rank:
        """Loads this rank's share of the model, and warms it up."""


class TargetShard(_Shard):
    """One rank of the target model: scores and verifies."""

    def _load(self) -> Rank:
        from cluster.workers.profiled_rank import ProfiledRank
        from cluster.workers.rank import TargetRank

        return ProfiledRank(TargetRank(self._spec), self._spec.rank)


class DraftShard(_Shard):
    """One rank of the draft model: drafts, and then catches up while the target works."""

    def _load(self) -> Rank:
        from cluster.workers.profiled_rank import ProfiledRank
        from cluster.workers.rank import DraftRank

        return ProfiledRank(DraftRank(self._spec), self._spec.rank)
