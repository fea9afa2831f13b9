"""A draft model in a separate process, pinned to some cores, as a worker group."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.groups.ranks import RankLoss
from cluster.workers.messages import serialization
from cluster.workers.transport.transport import StepSocket, has_message
from cluster.workers.transport.unix_socket import PeerGoneError, UnixListener, UnixSocket
from specdec.config.engine import DraftLimits
from specdec.config.quantization import QuantizationMethod

_START_TIMEOUT_S = 120.0
_STEP_TIMEOUT_S = 30.0


def draft_spec(
    directory: Path, limits: DraftLimits, quantization: QuantizationMethod | None
) -> GroupSpec:
    """Return the specification of a draft model of one rank, in float32."""
    return GroupSpec(
        name="draft model",
        model=ModelSource(directory.name, directory),
        dtype="float32",
        device="cpu",
        quantization=quantization,
        kernels="auto",
        tensor_parallel_size=1,
        limits=limits,
        replicas_per_node=1,
        bundles=(0,),
        transport="ipc",
        start_timeout_s=_START_TIMEOUT_S,
        step_timeout_s=_STEP_TIMEOUT_S,
        logs=LogConfig(),
    )


class PinnedRanks:
    """One rank in a process that runs on the given cores; in place of `workers.groups.ranks`."""

    are_shared = False

    def __init__(self, spec: GroupSpec, cores: Sequence[int]) -> None:
        """Start the process; it loads the model once it is connected."""
        self._directory = TemporaryDirectory(prefix="specdec-pinned-")
        path = Path(self._directory.name) / "rank"
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        self._process = context.Process(
            target=_serve, args=(spec, path, tuple(cores), ready), daemon=True
        )
        self._process.start()
        if not ready.wait(_START_TIMEOUT_S):
            raise TimeoutError("the process of the draft model did not start")
        self._path = path

    def connect(self, context: Any) -> Iterator[StepSocket]:
        """Yield the socket of the rank."""
        del context
        yield UnixSocket.connect(self._path, _STEP_TIMEOUT_S)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process since its start."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def loss(self) -> RankLoss | None:
        """Return whether the process has ended."""
        return None if self._process.is_alive() else RankLoss(0, "ended")

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait for the end of the process."""
        self._process.join(timeout_s)

    def kill(self) -> None:
        """End the process, and remove its socket."""
        self._process.kill()
        self._directory.cleanup()


def _serve(spec: GroupSpec, path: Path, cores: tuple[int, ...], ready: Any) -> None:
    """Pin the process, load the model, and execute steps until the stop message."""
    os.sched_setaffinity(0, cores)
    from cluster.workers.rank.worker import load_worker

    listener = UnixListener(path)
    ready.set()
    socket = listener.accept()
    worker = load_worker(spec, 0, path.parent)
    try:
        while (frames := socket.receive()) != serialization.STOP:
            for answer in worker.run(frames, lambda: has_message(socket)):
                socket.send(answer)
    except PeerGoneError:
        return
