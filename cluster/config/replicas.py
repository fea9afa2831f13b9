"""Settings of the replicas of a model: their number, and how requests are distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cluster.config.objective import Objective
from cluster.config.receipts import ReceiptConfig
from specdec.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    one_of,
    optional,
    setting,
    whole_number,
)
from specdec.types.errors import InvalidValueError

RoutingPolicy = Literal["prefix", "power_of_two", "random"]


@dataclass(frozen=True)
class ReplicaConfig(ReceiptConfig):
    """Configuration of a model with its replicas, whose number is fixed or scaled."""

    num_replicas: int = setting(
        1, whole_number(1, 1024), "Number of replicas; more than one needs --ingress serve"
    )
    min_replicas: int = setting(
        1, whole_number(1, 1024), "Minimum number of replicas when autoscaling with max_replicas"
    )
    max_replicas: int | None = setting(
        None,
        optional(whole_number(1, 1024)),
        "Maximum number of replicas; enables autoscaling and needs --ingress serve",
        "no autoscaling",
    )
    target_requests_per_replica: float = setting(
        32.0,
        POSITIVE,
        "Target number of running and waiting requests per replica; the autoscaler adds a replica "
        "above it",
    )
    slo: str | None = setting(
        None,
        optional(TEXT),
        'Objective such as "ttft:2000 tpot:40", in milliseconds to the first token and for each '
        "later one; the replicas that it needs are counted, and added with max_replicas",
        "no objective",
    )
    upscale_delay_s: float = setting(
        10.0, NOT_NEGATIVE, "Seconds of sustained high load before a replica is added"
    )
    downscale_delay_s: float = setting(
        120.0, NOT_NEGATIVE, "Seconds of sustained low load before a replica is removed"
    )
    routing_policy: RoutingPolicy = setting(
        "prefix",
        one_of(*get_args(RoutingPolicy)),
        "How Ray Serve's proxies choose a replica: prefix prefers one that has computed the "
        "beginning of the prompt, within a bound on its load; power_of_two takes the one of two "
        "with fewer open requests",
    )

    @property
    def fewest_replicas(self) -> int:
        """Number of replicas at the lowest load."""
        return self.num_replicas if self.max_replicas is None else self.min_replicas

    @property
    def objective(self) -> Objective | None:
        """The objective of `slo`; None without one."""
        return None if self.slo is None else Objective.parse(self.slo)

    @property
    def most_replicas(self) -> int:
        """Number of replicas at the highest load."""
        return self.max_replicas or self.num_replicas

    def _check_together(self) -> None:
        super()._check_together()
        _ = self.objective  # raises
        speculation = self.speculative_config
        if self.slo and (speculation is None or speculation.chosen_policy != "goodput"):
            limit = (
                "left out unless speculative_config has the policy goodput: others do not measure "
                "the tokens per second by load, from which the number of replicas is computed"
            )
            raise InvalidValueError("slo", self.slo, limit)
        if self.max_replicas is None and self.min_replicas != 1:
            limit = "left out unless max_replicas is given; num_replicas sets a fixed number"
            raise InvalidValueError("min_replicas", self.min_replicas, limit)
        if self.max_replicas is not None and self.num_replicas != 1:
            limit = "left out where max_replicas is given; set min_replicas instead"
            raise InvalidValueError("num_replicas", self.num_replicas, limit)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            limit = f"at least min_replicas ({self.min_replicas})"
            raise InvalidValueError("max_replicas", self.max_replicas, limit)
