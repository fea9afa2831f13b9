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
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.transport.transport import Listener, Transport
from cluster.workers.transport.unix_socket import parent_of_sockets
from specdec.config.engine import DraftLimits
from specdec.types.errors import DraftFailedError

if TYPE_CHECKING:  # imports torch
    from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop

logger = logging.getLogger(__name__)


class SharedDraftWorker:
    """The only rank of a draft model, with seats for Routers. It ends the process if a step fails.

    The thread loads and computes; the methods are for other threads. loop: see SharedDraftLoop.
    """

    def __init__(self, spec: GroupSpec, num_seats: int, name: str) -> None:
        """Load the model; raise what that raises, and DraftFailedError after `start_timeout_s`.

        spec: with the limits of one Router; the pool has as many blocks for each seat. name: for
        Routers.
        """
        assert isinstance(spec.limits, DraftLimits), "the spec of a target"
        assert spec.tensor_parallel_size == 1, "a shared draft worker has one rank"
        self._spec = spec
        self._limits = spec.limits
        self._num_seats = num_seats
        self._name = name
        # On this node: a Unix socket needs no other one.
        self._directory = tempfile.TemporaryDirectory(
            prefix="specdec-seats-", dir=parent_of_sockets(), ignore_cleanup_errors=True
        )
        self._numbers = count()
        warm: Future[SharedDraftLoop] = Future()
        threading.Thread(target=self._run, args=(warm,), name="shared-draft", daemon=True).start()
        limit_s = spec.start_timeout_s
        if not wait([warm], limit_s).done and warm.cancel():
            raise DraftFailedError(
                f"the draft model was not loaded within {limit_s:g} s (start_timeout_s)"
            )
        self.loop = warm.result()

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

        admitted = self.loop.admit(listen, request.most_taken, is_move=request.is_move)
        if admitted is None:
            return None
        index, endpoint = admitted
        return Seat(endpoint, self._limits.num_blocks, self._name, index)

    def _run(self, warm: Future[SharedDraftLoop]) -> None:
        run_as_model()
        try:
            with self._directory:
                self._load_and_serve(warm)
        except Exception:
            logger.exception("the shared draft worker ends")
            os._exit(1)  # the state of the model is not known; Serve starts another process

    def _load_and_serve(self, warm: Future[SharedDraftLoop]) -> None:
        try:
            loop = self._loaded()
            if not warm.set_running_or_notify_cancel():
                return  # not in time
        except Exception as error:
            if warm.set_running_or_notify_cancel():
                warm.set_exception(error)
            return
        logger.info("the draft model is warm, with %d seats", self._num_seats)
        warm.set_result(loop)
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
