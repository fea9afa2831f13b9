"""Settings of draft workers that replicas share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.replicas import ReplicaConfig
from specdec.config.fields import Limit, optional, setting, whole_number
from specdec.types.errors import InvalidValueError


def _is_utilization(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1


_UTILIZATION = Limit("above 0 and below 1", _is_utilization, kind=float, brief="0 to 1")


@dataclass(frozen=True)
class DraftWorkersConfig(ReplicaConfig):
    """Configuration of a model with the draft workers of its replicas.

    With replicas_per_draft_worker the number of workers is fixed, and each has as many seats. With
    max_draft_workers it is scaled, and each worker has a seat for every replica. Only where both
    bounds are equal there may be more workers than replicas, in reserve.
    """

    replicas_per_draft_worker: int = setting(
        1,
        whole_number(1, 64),
        "Replicas that share a draft worker, each with its own part of its KV cache; needs a draft "
        "model on one rank. With 1 each replica has its own worker",
    )
    min_draft_workers: int = setting(
        1, whole_number(1, 64), "Minimum number of draft workers with max_draft_workers"
    )
    max_draft_workers: int | None = setting(
        None,
        optional(whole_number(1, 64)),
        "Maximum number of draft workers that all replicas share; scales them, and needs a draft "
        "model on one rank",
        "no scaling",
    )
    target_draft_utilization: float = setting(
        0.7,
        _UTILIZATION,
        "Part of the time that shared draft workers compute, above which one is added",
    )

    @property
    def shares_draft_workers(self) -> bool:
        """Return whether replicas draft on workers that they share."""
        return self._has_pool or self.replicas_per_draft_worker > 1

    @property
    def num_draft_seats(self) -> int:
        """Number of replicas that a shared draft worker has a seat for."""
        return self.most_replicas if self._has_pool else self.replicas_per_draft_worker

    @property
    def fewest_shared_draft_workers(self) -> int:
        """Number of workers that replicas share at the lowest load."""
        return self.min_draft_workers if self._has_pool else self.num_shared_draft_workers

    @property
    def num_shared_draft_workers(self) -> int:
        """Number of workers that replicas share at the highest load."""
        if not self.shares_draft_workers:
            return 0
        return self.max_draft_workers or -(-self.most_replicas // self.replicas_per_draft_worker)

    @property
    def _has_pool(self) -> bool:
        return self.max_draft_workers is not None

    def _check_together(self) -> None:
        super()._check_together()
        self._check_pool()
        if not self.shares_draft_workers:
            return
        name, none = "replicas_per_draft_worker", "1"
        if self._has_pool:
            name, none = "max_draft_workers", "left out"
        if (reason := _why_not_shared(self)) is not None:
            raise InvalidValueError(name, getattr(self, name), f"{none} {reason}")
        has_reserve = self.max_draft_workers == self.min_draft_workers
        if getattr(self, name) > self.most_replicas and not has_reserve:
            limit = f"at most the number of replicas ({self.most_replicas})"
            raise InvalidValueError(name, getattr(self, name), limit)

    def _check_pool(self) -> None:
        most, fewest = self.max_draft_workers, self.min_draft_workers
        if most is not None and most < fewest:
            raise InvalidValueError("max_draft_workers", most, f"at least {fewest}, the minimum")
        unused = dict[str, str]()
        if most is None:
            names = "min_draft_workers", "target_draft_utilization"
            unused = dict.fromkeys(names, "unless max_draft_workers is given")
        else:
            unused["replicas_per_draft_worker"] = (
                "with max_draft_workers: each worker has a seat for every replica"
            )
            if most == fewest:
                unused["target_draft_utilization"] = (
                    "where max_draft_workers is min_draft_workers: their number is fixed"
                )
        for name, condition in unused.items():
            if (value := getattr(self, name)) != getattr(DraftWorkersConfig, name):
                raise InvalidValueError(name, value, f"left out {condition}")


def _why_not_shared(config: DraftWorkersConfig) -> str | None:
    """Return why a configuration cannot share draft workers, or None."""
    drafting = config.draft_model
    if drafting is None:
        return "unless speculative_config has the method draft_model"
    if drafting.draft_tensor_parallel_size > 1:
        return (
            "with a draft_tensor_parallel_size above 1: its ranks would have to agree in which "
            "order they execute the messages of several replicas"
        )
    if drafting.share_gpu:
        return "with share_gpu: a worker that replicas share has a separate device"
    if config.adapter_limits is not None:
        return "with enable_lora: each replica numbers the adapters of its draft model itself"
    return None
