"""Two engines and a draft worker that they share, on real sockets, without Ray."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.supervisors import DraftSupervisor
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.shared_draft.draft_seats import Seat, SeatRanks
from cluster.workers.shared_draft.shared_draft_loop import SharedDraftLoop
from cluster.workers.transport.transport import CurveKeys, Endpoint, Listener
from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import DraftFailedError
from specdec.worker import RankModel, load_draft
from tests.specdec.engines import engine_config, local_engine

LIMITS = DraftLimits(num_blocks=120, block_size=4, max_model_len=160, max_catch_up_tokens=16)


def spec_of(directory, transport=None):
    return GroupSpec(
        "draft model", ModelSource("m", directory), "float32", "cpu", None, "auto", 1, LIMITS, 2,
        (0,), transport, 60.0, 60.0, LogConfig(),
    )  # fmt: skip


class ThreadedWorker:
    """The loop of a shared worker in a thread, with a real draft model."""

    def __init__(self, model_dir, num_seats=2, transport="ipc", clock=time.monotonic):
        limits = DraftLimits(**{**vars(LIMITS), "num_blocks": num_seats * LIMITS.num_blocks})
        self.runner = load_draft(RankModel(model_dir, "float32", limits), TensorParallelGroup())
        self.loop = SharedDraftLoop(self.runner, num_seats, LIMITS.num_blocks, clock)
        self._directory = tempfile.TemporaryDirectory(prefix="specdec-test-")  # short, for sockets
        self.num_blocks = LIMITS.num_blocks  # that a seat claims
        self._transport, self._numbers = transport, itertools.count()
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def listener(self, public_key):
        path = Path(self._directory.name) / f"seat-{next(self._numbers)}"
        return Listener(self._transport, "127.0.0.1", public_key, path, polls_lost=True)

    def seat_ranks(self):
        """Return a new seat, or raise DraftFailedError."""
        keys = CurveKeys.generate()
        seat = self.admit(keys.public)
        if seat is None:
            raise DraftFailedError("all seats are taken")
        return SeatRanks(seat, keys, 60.0)

    def admit(self, public_key, most_taken=9, *, is_move=False, name="w"):
        """Return a new seat, or None."""
        admitted = self.loop.admit(lambda: self.listener(public_key), most_taken, is_move=is_move)
        if admitted is None:
            return None
        index, endpoint = admitted
        return Seat(endpoint, self.num_blocks, name, index)

    def pause(self):
        """Stop answering, as a process does after SIGSTOP."""
        self._draft, lock = self.runner.draft, threading.Event()
        self.resume = lock.set
        self.runner.draft = lambda step: (lock.wait(60), self._draft(step))[1]

    def stop(self):
        self.loop.stop()
        self._thread.join(10)
        self._directory.cleanup()


def supervisor(model_dir, seat_ranks):
    """Return a proposer like a Router's, at a shared worker. seat_ranks: returns new ones."""
    start = lambda: WorkerGroup(DRAFT, spec_of(model_dir), None, seat_ranks())  # noqa: E731
    return DraftSupervisor(start, LIMITS, DraftVocabulary())


def engine_of(target_dir, proposer, mode="off", k=3):
    speculation = SpeculativeConfig.of("draft_model", k, async_drafting=mode)
    return local_engine(target_dir, engine_config(0, speculation=speculation), None, proposer)


class ProcessWorker:
    """A worker in a separate process, which another one replaces when it has ended."""

    def __init__(self, model_dir):
        self._model_dir = model_dir
        self._lock = threading.Lock()  # two Routers may ask at once
        self.process = None
        self.num_started = 0

    def seat_ranks(self):
        keys = CurveKeys.generate()
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            self.process.stdin.write(keys.public.decode() + "\n")
            self.process.stdin.flush()
            address = self.process.stdout.readline().strip()
        if not address:
            raise DraftFailedError("no seat")
        return SeatRanks(Seat(Endpoint(address), LIMITS.num_blocks, "w", 0), keys, 60.0)

    def _start(self):
        self.num_started += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.workers.shared_drafts", str(self._model_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self):
        with self._lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait(10)
                self.process.stdin.close()
                self.process.stdout.close()


def main(model_dir):
    """Admit a Router for each line of standard input, which has its public key."""
    worker = ThreadedWorker(Path(model_dir))
    for line in sys.stdin:
        seat = worker.admit(line.strip().encode())
        print(seat.endpoint.address if seat else "", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
