"""Ray actor of a draft model that several Routers share, each with a seat."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster.observability import logs
from cluster.workers.cpu_scheduling import run_as_model
from cluster.workers.group_spec import GroupSpec
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.transport.transport import Listener, Transport
from specdec.config.engine import DraftLimits
from specdec.types.errors import DraftFailedError

if TYPE_CHECKING:  # imports torch
    from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop

logger = logging.getLogger(__name__)


class SharedDraftWorker:
    """The only rank of a draft model, with seats for Routers.

    `run` takes the thread that loads and computes; the other methods need another one.
    """

    def __init__(self, spec: GroupSpec, num_seats: int) -> None:
        """spec: with the limits of one Router; the pool has as many blocks for each seat."""
        assert isinstance(spec.limits, DraftLimits), "the spec of a target"
        assert spec.tensor_parallel_size == 1, "a shared draft worker has one rank"
        logs.configure(spec.logs)
        self._spec = spec
        self._limits = spec.limits
        self._num_seats = num_seats
        # On this node: a Unix socket needs no other one.
        self._directory = Path(tempfile.mkdtemp(prefix="specdec-seats-"))
        self._numbers = count()
        self._loop: SharedDraftLoop | None = None
        self._is_warm = threading.Event()

    def run(self) -> None:
        """Load, warm up, and serve Routers until `stop`. Raises what loading and steps raise."""
        from cluster.workers.rank.worker import load_worker
        from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop
        from specdec.worker import DraftModelRunner

        run_as_model()
        limits = replace(
            self._limits,
            num_blocks=self._num_seats * self._limits.num_blocks,
            max_num_seqs=self._num_seats * self._limits.max_num_seqs,
        )
        try:
            worker = load_worker(replace(self._spec, limits=limits), 0, self._directory)
            assert isinstance(worker.runner, DraftModelRunner), "the model of a target"
            loop = SharedDraftLoop(worker.runner, self._num_seats, self._limits.num_blocks)
            self._loop = loop
            self._is_warm.set()
            loop.run()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def wait_until_warm(self, timeout_s: float) -> None:
        """Return once Routers can be admitted. Raises DraftFailedError."""
        if not self._is_warm.wait(timeout_s):
            raise DraftFailedError(f"the draft model was not loaded within {timeout_s:g} s")

    def admit(self, request: SeatRequest) -> Seat | None:
        """Return a seat for a Router, or None while all are taken."""
        loop = self._loop
        if loop is None:
            return None
        own_address = str(ray.util.get_node_ip_address())
        is_near = request.address == own_address
        transport: Transport = self._spec.transport or ("ipc" if is_near else "tcp")

        def listen(_: int) -> Listener:
            path = self._directory / f"seat-{next(self._numbers)}"
            return Listener(transport, own_address, request.public_key, path)

        endpoint = loop.admit(listen)
        return None if endpoint is None else Seat(endpoint, self._limits.num_blocks)

    def num_taken(self) -> int:
        """Return the number of seats that are taken."""
        return 0 if self._loop is None else self._loop.num_taken
