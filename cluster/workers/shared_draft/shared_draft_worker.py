"""A draft model in a thread of this process, with seats for Routers."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster.workers.cpu_scheduling import run_as_model
from cluster.workers.group_spec import GroupSpec
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest, SeatUse, WorkerLoad
from cluster.workers.transport.transport import Listener, Transport
from specdec.config.engine import DraftLimits
from specdec.types.errors import DraftFailedError

if TYPE_CHECKING:  # imports torch
    from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop

logger = logging.getLogger(__name__)


class SharedDraftWorker:
    """The only rank of a draft model, with seats for Routers. It ends the process if a step fails.

    The thread loads and computes; the methods are for other threads.
    """

    def __init__(self, spec: GroupSpec, num_seats: int, name: str) -> None:
        """Load in the background, see `wait_until_warm`. name: for Routers.

        spec: with the limits of one Router; the pool has as many blocks for each seat.
        """
        assert isinstance(spec.limits, DraftLimits), "the spec of a target"
        assert spec.tensor_parallel_size == 1, "a shared draft worker has one rank"
        self._spec = spec
        self._limits = spec.limits
        self._num_seats = num_seats
        self._name = name
        # On this node: a Unix socket needs no other one.
        self._directory = tempfile.TemporaryDirectory(
            prefix="specdec-seats-", ignore_cleanup_errors=True
        )
        self._numbers = count()
        self._warm: Future[SharedDraftLoop] = Future()
        threading.Thread(target=self._run, name="shared-draft", daemon=True).start()

    def wait_until_warm(self) -> None:
        """Return once Routers can be admitted. Raises what loading raises.

        Raises DraftFailedError after `start_timeout_s`.
        """
        limit_s = self._spec.start_timeout_s
        if not wait([self._warm], limit_s).done:
            raise DraftFailedError(
                f"the draft model was not loaded within {limit_s:g} s (start_timeout_s)"
            )
        self._warm.result()

    def admit(self, request: SeatRequest) -> Seat | None:
        """Return a seat for a Router, if it is large enough; see SharedDraftLoop.admit."""
        if request.num_blocks > self._limits.num_blocks:
            return None
        own_address = str(ray.util.get_node_ip_address())
        is_near = request.address == own_address
        transport: Transport = self._spec.transport or ("ipc" if is_near else "tcp")

        def listen() -> Listener:
            path = Path(self._directory.name, f"seat-{next(self._numbers)}")
            return Listener(transport, own_address, request.public_key, path, polls_lost=True)

        admitted = self._warm.result().admit(listen, request.most_taken, is_move=request.is_move)
        if admitted is None:
            return None
        index, endpoint = admitted
        return Seat(endpoint, self._limits.num_blocks, self._name, index)

    def load(self) -> WorkerLoad:
        """Return the present load."""
        loop = self._warm.result()
        shares = loop.shares
        uses = {seat: SeatUse(shares.share(seat), each) for seat, each in shares.step_s().items()}
        return WorkerLoad(loop.num_taken, shares.utilization(), shares.share(), uses)

    def stop(self) -> None:
        """End the loop after the present message."""
        if self._warm.done() and self._warm.exception() is None:
            self._warm.result().stop()

    def _run(self) -> None:
        run_as_model()
        try:
            with self._directory:
                self._load_and_serve()
        except Exception:
            logger.exception("the shared draft worker ends")
            os._exit(1)  # the state of the model is not known; Serve starts another process

    def _load_and_serve(self) -> None:
        try:
            loop = self._loaded()
        except Exception as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(loop)
        loop.run()

    def _loaded(self) -> SharedDraftLoop:
        from cluster.workers.rank.worker import load_worker
        from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop
        from specdec.worker import DraftModelRunner

        limits = replace(
            self._limits,
            num_blocks=self._num_seats * self._limits.num_blocks,
            max_num_seqs=self._num_seats * self._limits.max_num_seqs,
        )
        worker = load_worker(replace(self._spec, limits=limits), 0, Path(self._directory.name))
        assert isinstance(worker.runner, DraftModelRunner), "the model of a target"
        return SharedDraftLoop(worker.runner, self._num_seats, self._limits.num_blocks)
