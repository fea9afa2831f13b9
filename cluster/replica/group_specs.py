"""Specifications of the worker groups of a service: of its targets and its draft models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from cluster.workers.ray.resources import draft_bundle, gpus_per_rank, target_bundles
from specdec.config.engine import DEFAULT_MODEL_OPTIONS, DraftLimits, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.engine.memory.gpu_memory import gpu_memory_settings
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.speculation.proposers import DraftVocabulary

if TYPE_CHECKING:  # imports Ray, which reads the environment when it is imported
    from cluster.workers.group_spec import GroupSpec, HeadSpec

_DRAFT_TIMEOUT_S = 10.0
"""Streams wait for drafts; a slower draft worker is better restarted."""


def target_spec(
    config: ServeConfig, directories: ModelDirectories, limits: EngineConfig, replicas_per_node: int
) -> GroupSpec:
    """Return the spec of a replica's target. replicas_per_node: those that share its cores."""
    spec = _group_spec(
        config,
        "target",
        config.model,
        directories.target,
        config.tensor_parallel_size,
        limits,
        config.quantization_method,
        replicas_per_node,
    )
    return replace(spec, head=_head_spec(config, directories))


def draft_spec(
    config: ServeConfig,
    directories: ModelDirectories,
    limits: DraftLimits,
    vocabulary: DraftVocabulary,
    replicas_per_node: int,
) -> GroupSpec:
    """Return the spec of a draft model, which must exist; see `target_spec`."""
    drafting, directory = config.draft_model, directories.draft
    assert drafting is not None, "no draft model is configured"
    assert directory is not None, "a draft model without a directory"
    spec = _group_spec(
        config,
        "draft model",
        drafting.model or config.model,
        directory,
        drafting.draft_tensor_parallel_size,
        limits,
        drafting.quantization,
        replicas_per_node,
    )
    return replace(spec, vocabulary=vocabulary.shared)


def _head_spec(config: ServeConfig, directories: ModelDirectories) -> HeadSpec | None:
    from cluster.workers.group_spec import HeadSpec, ModelSource

    method, directory = config.head, directories.head
    if method is None or directory is None:
        return None
    model = ModelSource(
        method.model or config.model, directory, may_be_pickled=method.model is not None
    )
    token_map = method.speculative_token_map
    return HeadSpec(model, method.quantization, method.window, token_map, method.name)


def _group_spec(
    config: ServeConfig,
    name: str,
    model: str,
    directory: Path,
    size: int,
    limits: EngineConfig | DraftLimits,
    quantization: QuantizationMethod | None,
    replicas_per_node: int,
) -> GroupSpec:
    from cluster.workers.group_spec import GroupSpec, ModelSource

    is_target = isinstance(limits, EngineConfig)
    timeout_s = config.step_timeout_s
    bundles = target_bundles(config) if is_target else [draft_bundle(config)]
    return GroupSpec(
        name=name,
        model=ModelSource(model, directory),
        dtype=config.resolved_dtype,
        device=config.device,
        quantization=quantization,
        kernels=config.kernels,
        tensor_parallel_size=size,
        limits=limits,
        replicas_per_node=replicas_per_node,
        bundles=tuple(bundles[rank % len(bundles)] for rank in range(size)),
        transport=None if config.transport == "auto" else config.transport,
        start_timeout_s=config.start_timeout_s,
        step_timeout_s=timeout_s if is_target else min(timeout_s, _DRAFT_TIMEOUT_S),
        logs=config.logs,
        gpus_per_rank=gpus_per_rank(config),
        options=config.model_options if is_target else DEFAULT_MODEL_OPTIONS,
        disable_custom_all_reduce=config.disable_custom_all_reduce,
        memory_settings=gpu_memory_settings(config),
    )
