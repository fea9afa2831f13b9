"""What an actor does with its rank of a model: loads it, warms it up, and runs steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

import torch

from cluster.workers import serialization
from cluster.workers.actor import ShardSpec
from cluster.workers.resources import threads_per_shard
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.distributed.group import TensorParallelGroup
from specdec.worker import ModelRunner, Rendezvous, load_draft_runner, load_runner

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Covers ranks that load at different speeds. The Router's deadline for a step is the short one."""


class Rank(Protocol):
    """A rank that is loaded and warm."""

    @property
    def runner(self) -> ModelRunner:
        """What runs the model."""
        ...

    def run(self, frames: serialization.Frames) -> Iterator[serialization.Frames]:
        """Runs one step; its answers, each before what follows it has run."""
        ...


class TargetRank:
    """Of the target model."""

    def __init__(self, spec: ShardSpec) -> None:
        """A collective call."""
        limits = spec.limits
        assert isinstance(limits, EngineConfig)
        self.runner = load_runner(
            spec.model.here(),
            spec.dtype,
            limits,
            _join_group(spec),
            spec.quantization,
            torch.device(spec.device),
            spec.kernels,
        )
        self.runner.warm_up(min(limits.max_num_batched_tokens, limits.max_model_len - 1))

    def run(self, frames: serialization.Frames) -> Iterator[serialization.Frames]:
        """See Rank."""
        yield serialization.encode_output(self.runner.execute(serialization.decode_step(frames)))


class DraftRank:
    """Of the draft model."""

    def __init__(self, spec: ShardSpec) -> None:
        """A collective call."""
        limits = spec.limits
        assert isinstance(limits, DraftLimits)
        self.runner = load_draft_runner(
            spec.model.here(),
            spec.dtype,
            limits,
            _join_group(spec),
            spec.quantization,
            torch.device(spec.device),
            spec.vocabulary,
            spec.kernels,
        )
        self.runner.warm_up(min(limits.max_catch_up_tokens, limits.max_model_len - 1))

    def run(self, frames: serialization.Frames) -> Iterator[serialization.Frames]:
        """See Rank; the drafts are answered before the rank catches up."""
        step = serialization.decode_draft_step(frames)
        drafts = self.runner.draft(step)
        if step.drafts:
            yield serialization.encode_draft_output(drafts)
        if step.rows:
            self.runner.catch_up(step)
        if step.rows or not step.drafts:
            yield serialization.CAUGHT_UP


def _join_group(spec: ShardSpec) -> TensorParallelGroup:
    torch.set_num_threads(threads_per_shard(spec.size, spec.num_replicas))
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
