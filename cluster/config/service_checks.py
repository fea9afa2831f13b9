"""Checks of settings of the service that depend on each other; each raises InvalidValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from specdec.config.methods import DraftModelConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.config.engine import AdapterLimits


class Settings(Protocol):
    """The settings of a ServeConfig that are checked; see there."""

    @property
    def speculative_config(self) -> SpeculativeConfig | None: ...

    @property
    def draft_model(self) -> DraftModelConfig | None: ...

    @property
    def adapter_limits(self) -> AdapterLimits | None: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def min_replicas(self) -> int: ...

    @property
    def max_replicas(self) -> int | None: ...

    @property
    def most_replicas(self) -> int: ...

    @property
    def ingress(self) -> str: ...

    @property
    def ray_address(self) -> str | None: ...

    @property
    def draft_labels(self) -> str | None: ...

    @property
    def replicas_per_draft_worker(self) -> int: ...

    @property
    def shares_draft_workers(self) -> bool: ...

    @property
    def training_buffer_tokens(self) -> int: ...

    @property
    def training_cache_salt(self) -> str | None: ...

    @property
    def allow_synthetic_acceptance(self) -> bool: ...


def check_verifiers(config: Settings) -> None:
    """Check that a verifier for measurements alone is allowed explicitly."""
    speculation = config.speculative_config
    if speculation is None or config.allow_synthetic_acceptance:
        return
    if "synthetic" in speculation.allowed_verifiers:
        limit = "without synthetic unless allow_synthetic_acceptance is given: it accepts wrong "
        limit += "draft tokens, for measurements"
        field = "speculative_config.allowed_verifiers"
        raise InvalidValueError(field, speculation.allowed_verifiers, limit)


def check_training(config: Settings) -> None:
    """Check that there is a head to train where answers are kept for training."""
    speculation = config.speculative_config
    if config.training_buffer_tokens:
        # The files of the model decide about what was left out.
        has_head = speculation is not None and (
            speculation.head is not None
            or not speculation.left_out.isdisjoint({"method", "drafter"})
        )
        if not has_head:
            limit = "0 unless speculative_config has a draft head, which the answers train"
            raise InvalidValueError("training_buffer_tokens", config.training_buffer_tokens, limit)
    elif config.training_cache_salt is not None:
        limit = "left out unless training_buffer_tokens is given"
        raise InvalidValueError("training_cache_salt", config.training_cache_salt, limit)


def check_replicas(config: Settings) -> None:
    """Check the number of replicas, fixed or scaled, and that several have a shared ingress."""
    if config.max_replicas is None and config.min_replicas != 1:
        limit = "left out unless max_replicas is given; num_replicas sets a fixed number"
        raise InvalidValueError("min_replicas", config.min_replicas, limit)
    if config.max_replicas is not None and config.num_replicas != 1:
        limit = "left out where max_replicas is given; set min_replicas instead"
        raise InvalidValueError("num_replicas", config.num_replicas, limit)
    if config.max_replicas is not None and config.max_replicas < config.min_replicas:
        limit = f"at least min_replicas ({config.min_replicas})"
        raise InvalidValueError("max_replicas", config.max_replicas, limit)
    if config.ingress == "embedded" and (config.max_replicas or config.num_replicas > 1):
        limit = "serve for several replicas: embedded servers would all listen on the same ports"
        raise InvalidValueError("ingress", config.ingress, limit)


def check_cluster(config: Settings) -> None:
    """Check the settings of an existing Ray cluster and of its nodes."""
    if config.ray_address is not None and config.ingress != "serve":
        limit = "serve where ray_address is given: embedded servers could start on any of its nodes"
        raise InvalidValueError("ingress", config.ingress, limit)
    if config.draft_labels and config.draft_model is None:
        limit = "left out unless speculative_config has the method draft_model"
        raise InvalidValueError("draft_labels", config.draft_labels, limit)


def check_shared_draft_workers(config: Settings) -> None:
    """Check that replicas can share draft workers."""
    if not config.shares_draft_workers:
        return
    name, value, drafting = (
        "replicas_per_draft_worker",
        config.replicas_per_draft_worker,
        config.draft_model,
    )
    if drafting is None:
        limit = "1 unless speculative_config has the method draft_model"
        raise InvalidValueError(name, value, limit)
    if drafting.draft_tensor_parallel_size > 1:
        limit = (
            "1 with a draft_tensor_parallel_size above 1: its ranks would have to agree in "
            "which order they execute the messages of several replicas"
        )
        raise InvalidValueError(name, value, limit)
    if drafting.share_gpu:
        limit = "1 with share_gpu: a worker that replicas share has a separate device"
        raise InvalidValueError(name, value, limit)
    if config.adapter_limits is not None:
        limit = "1 with enable_lora: each replica numbers the adapters of its draft model itself"
        raise InvalidValueError(name, value, limit)
    if value > config.most_replicas:
        limit = f"at most the number of replicas ({config.most_replicas})"
        raise InvalidValueError(name, value, limit)
