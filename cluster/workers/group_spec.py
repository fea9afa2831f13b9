"""Specification of a worker group: its model, sharding, placement, and the sockets of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.observability.logs import LogConfig
from cluster.workers.transport.transport import Endpoint, Transport
from specdec.config.engine import (
    DEFAULT_MODEL_OPTIONS,
    DraftLimits,
    DTypeName,
    EngineConfig,
    Kernels,
    ModelOptions,
)
from specdec.config.quantization import QuantizationMethod
from specdec.models.resolve import log_progress, resolve
from specdec.text.vocab_map import VocabularyMap


@dataclass(frozen=True)
class ModelSource:
    """A model by the configured name, and its directory on the Router's node.

    may_be_pickled: as in `resolve`.
    """

    name: str
    directory: Path
    may_be_pickled: bool = False

    def here(self) -> Path:
        """Return its directory on this node; download it if needed. Raises ModelNotFoundError."""
        if self.directory.is_dir():
            return self.directory
        return resolve(self.name, progress=log_progress, may_be_pickled=self.may_be_pickled)


@dataclass(frozen=True)
class HeadSpec:
    """A draft head beside a target; the fields after `model` are as in `HeadFiles`."""

    model: ModelSource
    quantization: QuantizationMethod | None
    window: int | None = None
    token_map: str | None = None
    method: str | None = None


@dataclass(frozen=True)
class GroupSpec:
    """A model, how to shard it, where to place its ranks and how to reach them.

    name: of the model's role, for messages. device: its type. gpus_per_rank: that a rank reserves
    where the device is cuda; it uses at most one.
    limits: EngineConfig for a target, DraftLimits for a draft model.
    replicas_per_node: groups like this one that share the cores of a node.
    bundles: indices into the placement group, by rank. transport: None uses ipc on this node and
    tcp to others.
    vocabulary: tokens that a draft model shares with the target, where their vocabularies differ.
    head: the draft head beside a target, if any. disable_custom_all_reduce: whether ranks on GPUs
    sum by NCCL alone. memory_settings: as in RankModel.
    """

    name: str
    model: ModelSource
    dtype: DTypeName
    device: str
    quantization: QuantizationMethod | None
    kernels: Kernels
    tensor_parallel_size: int
    limits: EngineConfig | DraftLimits
    replicas_per_node: int
    bundles: tuple[int, ...]
    transport: Transport | None
    start_timeout_s: float
    step_timeout_s: float
    logs: LogConfig
    vocabulary: VocabularyMap | None = None
    head: HeadSpec | None = None
    gpus_per_rank: float = 1.0
    options: ModelOptions = DEFAULT_MODEL_OPTIONS
    disable_custom_all_reduce: bool = False
    memory_settings: str = "max_num_seqs"


@dataclass(frozen=True)
class RankPlace:
    """Where the process of a rank runs.

    address: of its node. pid: on that node. visible_devices: the GPUs that Ray has assigned to it,
    as CUDA_VISIBLE_DEVICES; None where the variable is not set.
    """

    address: str
    node: str
    pid: int
    visible_devices: str | None


@dataclass(frozen=True)
class Peers:
    """Where the ranks of a group are, as one of them needs it.

    num_local: ranks on its node, itself included. If some are on others: `endpoints` at the ranks
    before it, or on GPUs `store`, the address and port at which rank 0 serves their rendezvous.
    """

    num_local: int = 1
    endpoints: tuple[Endpoint, ...] = ()
    store: tuple[str, int] | None = None


ALONE = Peers()
"""The place of a single rank, which has no others."""
