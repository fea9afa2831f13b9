"""One loaded rank inside its actor: executes steps, and profiles them on request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from cluster.workers.cpu_scheduling import threads_per_worker
from cluster.workers.group_spec import ALONE, GroupSpec, HeadSpec, Peers
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.profile_messages import WorkerProfileOrder, is_for_profiles, order_in
from cluster.workers.rank.draft_steps import DraftSteps
from cluster.workers.rank.gpu_store import join_store, use_interface_of
from cluster.workers.rank.heap import freeze_heap
from cluster.workers.rank.peer_connections import PeerConnections
from cluster.workers.rank.peer_exchange import PeerExchange
from cluster.workers.rank.target_steps import TargetSteps
from specdec.config.engine import EngineConfig
from specdec.kernels.collectives import OrderedCollectives
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.profile import WorkerProfile
from specdec.worker import (
    DraftModelRunner,
    HeadFiles,
    ModelRunner,
    RankComparison,
    RankModel,
    Rendezvous,
    StepProfiler,
    load_warm,
    native_library_fault,
)

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Covers ranks that load at different speeds; the Router's step deadline is much shorter."""

HasMessage = Callable[[], bool]
"""Returns whether another message has arrived after the one that is executed."""

StepFunction = Callable[[Frames, HasMessage], Iterator[Frames]]
"""Executes one step; yields each answer before the work that follows it."""


def _head_files(head: HeadSpec) -> HeadFiles:
    own = head.quantization, head.window, head.token_map, head.method
    return HeadFiles(head.model.here(), *own)


def prepare_to_load(spec: GroupSpec) -> None:
    """Load all libraries that `load_worker` uses, some of which it would import while it loads.

    Uses no GPU. Raises ModelNotFoundError.
    """
    Tokenizer(spec.model.here())
    if spec.device == "cpu" and spec.kernels != "torch":
        native_library_fault()


def load_worker(
    spec: GroupSpec,
    rank: int,
    directory: Path,
    peers: Peers = ALONE,
    connections: PeerConnections | None = None,
) -> ModelWorker:
    """Load this rank's shard of the model and warm it up. A collective call.

    connections: with the others, where some are on other nodes. What the process has loaded by then
    is taken out of garbage collections.
    """
    model = RankModel(
        spec.model.here(),
        spec.dtype,
        spec.limits,
        spec.quantization,
        torch.device(spec.device),
        spec.kernels,
        spec.vocabulary,
        None if spec.head is None else _head_files(spec.head),
        spec.options,
        spec.memory_settings,
    )
    runner = load_warm(model, _join_group(spec, rank, directory, peers, connections))
    freeze_heap()
    comparison = RankComparison.of(runner.group, is_wanted=spec.limits.compare_ranks)
    if isinstance(runner, DraftModelRunner):
        return ModelWorker(runner, DraftSteps(runner, rank, comparison=comparison), rank)
    steps = TargetSteps(runner, rank, comparison=comparison)
    return ModelWorker(runner, steps, rank, steps.finish)


def _join_group(
    spec: GroupSpec,
    rank: int,
    directory: Path,
    peers: Peers,
    connections: PeerConnections | None,
) -> TensorParallelGroup:
    size = spec.tensor_parallel_size
    torch.set_num_threads(threads_per_worker(peers.num_local, spec.replicas_per_node))
    if size == 1:
        return TensorParallelGroup()
    if connections is not None and peers.store is None:
        timeout_s = _COLLECTIVE_TIMEOUT.total_seconds()
        sockets = connections.connect(peers.endpoints, timeout_s)
        exchange = PeerExchange(rank, sockets, timeout_s)
        group = TensorParallelGroup(rank, size, OrderedCollectives(exchange, is_wide=True))
    else:
        group = _rendezvous(spec, rank, directory, peers, connections).join()
    logger.info("rank %d of %d exchanges tensors by %s", rank, size, group.describe())
    return group


def _rendezvous(
    spec: GroupSpec,
    rank: int,
    directory: Path,
    peers: Peers,
    connections: PeerConnections | None,
) -> Rendezvous:
    """Return the rendezvous of ranks on one node, or on the GPUs of several."""
    store = None
    if connections is None or peers.store is None:
        # The Router, which chose the path, may be on another node, so it may not exist here.
        directory.mkdir(mode=0o700, exist_ok=True)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the group needs no network
    else:
        use_interface_of(connections.address)
        size = spec.tensor_parallel_size
        store = join_store(peers.store, size, connections.store, _COLLECTIVE_TIMEOUT)
    return Rendezvous(
        rank,
        spec.tensor_parallel_size,
        spec.device,
        directory,
        _COLLECTIVE_TIMEOUT,
        is_custom=not spec.disable_custom_all_reduce,
        is_ordered=isinstance(spec.limits, EngineConfig) and spec.limits.deterministic,
        store=store,
    )


@dataclass(frozen=True)
class _Profile:
    order: WorkerProfileOrder
    profiler: StepProfiler


class ModelWorker:
    """A rank that is loaded and warm. It records its steps while a profile is active."""

    def __init__(
        self,
        runner: ModelRunner,
        execute: StepFunction,
        rank: int,
        finish: Callable[[], Iterator[Frames]] = lambda: iter(()),
    ) -> None:
        """finish: yields the answers of the steps in flight."""
        self.runner = runner
        self._finish = finish
        self._execute = execute
        self._rank = rank
        self._profile: _Profile | None = None

    def run(self, frames: Frames, has_message: HasMessage = lambda: False) -> Iterator[Frames]:
        """Execute a step, or begin or end a profile. Yields answers, then the report if it ends.

        Where another message has arrived, the answer of a step may come after that one.
        """
        if is_for_profiles(frames):
            yield from self._finish()
            yield from self._change_profile(order_in(frames))
        elif (profile := self._profile) is None:
            yield from self._execute(frames, has_message)
        else:
            with profile.profiler.step():
                yield from self._execute(frames, has_message)
                yield from self._finish()
            if profile.profiler.num_steps >= profile.order.num_steps:
                yield self._end(profile)

    def _change_profile(self, order: WorkerProfileOrder | None) -> Iterator[Frames]:
        """Begin a profile, or end the active one. Errors are reported and do not affect steps.

        A new order replaces an active profile: its client no longer waits for it.
        """
        active, self._profile = self._profile, None
        if order is None:
            if active is not None:
                yield self._end(active)
            return
        try:
            if active is not None:
                active.profiler.stop()
            Path(order.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._profile = _Profile(order, StepProfiler(self.runner))
        except Exception as error:
            yield self._failure(order, error, 0)

    def _end(self, profile: _Profile) -> Frames:
        self._profile = None
        order, num_steps = profile.order, profile.profiler.num_steps
        name = f"{order.worker.replace(' ', '-')}-rank-{self._rank}.json.gz"
        path = Path(order.directory) / name
        try:
            saved = profile.profiler.save(path, order.max_bytes)
        except Exception as error:
            return self._failure(order, error, num_steps)
        is_written = saved.size_bytes > 0
        return order.report(
            WorkerProfile(
                order.worker,
                self._rank,
                num_steps,
                trace_path=str(path) if is_written else "",
                trace_bytes=saved.size_bytes,
                operations=saved.operations,
                fault="" if is_written else f"the trace is larger than {order.max_bytes} bytes",
            )
        )

    def _failure(self, order: WorkerProfileOrder, error: Exception, num_steps: int) -> Frames:
        logger.error("the profile failed", exc_info=error)
        fault = f"{type(error).__name__}: {error}"
        return order.report(WorkerProfile(order.worker, self._rank, num_steps, fault=fault))
