"""Ray actors that hold one tensor-parallel rank of the target or the draft model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster.observability import logs
from cluster.workers import serialization
from cluster.workers.cpu_scheduling import run_as_model
from cluster.workers.frames import Frames
from cluster.workers.group_spec import GroupSpec
from cluster.workers.head_messages import is_load_report
from cluster.workers.profile_messages import is_report
from cluster.workers.transport import Endpoint, Listener, StepSocket, Transport
from cluster.workers.unix_socket import PeerGoneError

if TYPE_CHECKING:  # imports torch, which the Router that starts the actors does not need
    from cluster.workers.worker import ModelWorker

logger = logging.getLogger(__name__)


class Worker:
    """One rank. It executes the steps that arrive on its socket, in order, until a stop message.

    directory: for the sockets of this group; its Router removes it. The ranks of a group are always
    on one node.
    """

    def __init__(self, spec: GroupSpec, rank: int, directory: Path) -> None:
        logs.configure(spec.logs)
        self._spec = spec
        self._rank = rank
        self._directory = directory
        self._listener: Listener | None = None

    def node_address(self) -> str:
        """Return the address of this rank's node, which decides the transport."""
        return str(ray.util.get_node_ip_address())

    def bind(self, transport: Transport, peer_public_key: bytes) -> Endpoint:
        """Open the step socket for the Router that owns this key."""
        path = self._directory / f"rank-{self._rank}"
        self._listener = Listener(transport, self.node_address(), peer_public_key, path)
        return self._listener.endpoint

    def run(self) -> None:
        """Join the group, load, warm up, and execute steps until the stop message.

        Everything runs in one thread: OpenMP keeps a thread pool for each thread that computes, and
        puts pools beyond the number of cores to sleep.
        """
        assert self._listener is not None, "run before bind"
        run_as_model()
        try:
            socket = self._listener.accept()
            self._serve(self._load(), socket)
        except PeerGoneError:
            logger.info("rank %d ends because its Router has ended", self._rank)
        finally:
            self._listener.close()

    def _serve(self, worker: ModelWorker, socket: StepSocket) -> None:
        """Execute steps; after a step that failed, only wait for the stop message.

        A later step could meet peers that are in another one, in a collective operation. The group
        is ended as a whole.
        """
        has_failed = False
        while (frames := socket.receive()) != serialization.STOP:
            if not has_failed:
                has_failed = not self._execute(worker, frames, socket)

    def _execute(self, worker: ModelWorker, frames: Frames, socket: StepSocket) -> bool:
        """Return whether a message was processed without an error.

        Rank 0 answers steps; every rank reports its errors, profiles and loads of a head.
        """
        try:
            for answer in worker.run(frames):
                if self._rank == 0 or is_report(answer) or is_load_report(answer):
                    socket.send(answer)
        except PeerGoneError:
            raise
        except Exception as error:
            logger.exception("rank %d failed in a step", self._rank)
            socket.send(serialization.encode_error(f"{type(error).__name__}: {error}"))
            return False
        return True

    def _load(self) -> ModelWorker:
        from cluster.workers.worker import load_worker

        return load_worker(self._spec, self._rank, self._directory)


class TargetWorker(Worker):
    """One rank of the target model: scores and verifies. Ray shows processes by class name."""


class DraftWorker(Worker):
    """One rank of the draft model: drafts, and then catches up while the target runs."""
