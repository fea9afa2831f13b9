"""Ray actors that hold one tensor-parallel rank of the target or the draft model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
import zmq

from cluster.observability import logs
from cluster.workers.cpu_scheduling import run_as_model, run_at_low_priority
from cluster.workers.group_spec import GroupSpec, Peers, RankPlace
from cluster.workers.messages import serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import ADAPTERS, HEADS
from cluster.workers.messages.profile_messages import is_report
from cluster.workers.rank.peer_connections import PeerConnections
from cluster.workers.transport.transport import (
    Endpoint,
    Listener,
    StepSocket,
    Transport,
    has_message,
)
from cluster.workers.transport.unix_socket import PeerGoneError

if TYPE_CHECKING:  # imports torch, which the Router that starts the actors does not need
    from cluster.workers.rank.worker import ModelWorker

logger = logging.getLogger(__name__)


_REPORTS = (is_report, HEADS.is_report, ADAPTERS.is_report)
"""Tests for the answers that every rank sends."""

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_END_TIMEOUT_S = 5.0
_POLL_PERIOD_S = 0.01


class Worker:
    """One rank. It executes the steps that arrive on its socket, in order, until a stop message.

    directory: for the sockets of this group; its Router removes it. replaces: the rank that this
    one is a spare of. A spare loads its model after the other rank has ended, whose node, GPUs and
    share of the CPUs it takes over.
    """

    def __init__(
        self, spec: GroupSpec, rank: int, directory: Path, replaces: RankPlace | None = None
    ) -> None:
        logs.configure(spec.logs)
        self._spec = spec
        self._rank = rank
        self._directory = directory
        self._listener: Listener | None = None
        self._socket: StepSocket | None = None
        self._peers: PeerConnections | None = None
        self._replaced: psutil.Process | None = None
        if replaces is not None:
            _show_devices(replaces.visible_devices)
            with suppress(psutil.NoSuchProcess):
                self._replaced = psutil.Process(replaces.pid)

    def place(self) -> RankPlace:
        """Return where this rank runs; the node decides the transport."""
        node = str(ray.get_runtime_context().get_node_id())
        return RankPlace(_address(), node, os.getpid(), os.environ.get(_VISIBLE_DEVICES))

    def bind(self, transport: Transport, peer_public_key: bytes) -> Endpoint:
        """Open the step socket for the Router that owns this key."""
        path = self._directory / f"rank-{self._rank}"
        self._listener = Listener(transport, _address(), peer_public_key, path)
        return self._listener.endpoint

    def open_peers(self) -> bytes:
        """Make the key by which ranks on other nodes know this one, and return it."""
        self._peers = PeerConnections(self._rank, _address())
        return self._peers.public_key

    def open_store(self) -> tuple[str, int]:
        """See PeerConnections; on rank 0."""
        assert self._peers is not None, "open_store before open_peers"
        return self._peers.open_store()

    def listen_for_peers(self, public_keys: Sequence[bytes]) -> list[Endpoint]:
        """See PeerConnections.listen."""
        assert self._peers is not None, "listen_for_peers before open_peers"
        return self._peers.listen(public_keys)

    def prepare(self) -> None:
        """Load the libraries that `run` needs, at a low priority; a spare is then ready."""
        run_at_low_priority(self._prepare_to_load)

    def stand_by(self) -> None:
        """Wait until the Router needs this rank: it connects, and sends the first step."""
        self._socket = self._accept()
        poller = zmq.Poller()
        poller.register(self._socket.pollable, zmq.POLLIN)
        poller.poll()

    def run(self, peers: Peers) -> None:
        """Join the group, load, warm up, and execute steps until the stop message.

        Everything runs in one thread: OpenMP keeps a thread pool for each thread that computes, and
        puts pools beyond the number of cores to sleep. After an error the connections with the
        other ranks stay open, which would otherwise report this rank's end before its error; the
        group is killed.
        """
        assert self._listener is not None, "run before bind"
        run_as_model()
        try:
            socket = self._socket or self._accept()
            if self._replaced is not None:
                _wait_until_ended(self._replaced, _END_TIMEOUT_S)
            self._serve(self._load(peers), socket)
        except PeerGoneError:
            logger.info("rank %d ends because its Router has ended", self._rank)
        finally:
            self._listener.close()
        if self._peers is not None:
            self._peers.close()

    def _accept(self) -> StepSocket:
        assert self._listener is not None, "accept before bind"
        return self._listener.accept()

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

        Rank 0 answers steps; every rank reports its errors, profiles and loads.
        """
        try:
            for answer in worker.run(frames, lambda: has_message(socket)):
                if self._rank == 0 or any(each(answer) for each in _REPORTS):
                    socket.send(answer)
        except PeerGoneError:
            raise
        except Exception as error:
            logger.exception("rank %d failed in a step", self._rank)
            socket.send(serialization.encode_error(f"{type(error).__name__}: {error}"))
            return False
        return True

    def _prepare_to_load(self) -> None:
        from cluster.workers.rank.worker import prepare_to_load

        prepare_to_load(self._spec)

    def _load(self, peers: Peers) -> ModelWorker:
        from cluster.workers.rank.worker import load_worker

        return load_worker(self._spec, self._rank, self._directory, peers, self._peers)


class TargetWorker(Worker):
    """One rank of the target model: scores and verifies. Ray shows processes by class name."""


class DraftWorker(Worker):
    """One rank of the draft model: drafts, and then catches up while the target runs."""


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _show_devices(visible_devices: str | None) -> None:
    """Make these GPUs visible to the process; CUDA reads the variable when it is first used."""
    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices


def _wait_until_ended(process: psutil.Process, timeout_s: float) -> None:
    """Wait until a process of this node has released its memory. Raises TimeoutError."""
    ends_at_s = time.monotonic() + timeout_s
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > ends_at_s:
                raise TimeoutError(f"process {process.pid} did not end within {timeout_s:g} s")
            time.sleep(_POLL_PERIOD_S)
