"""Autoscaling policy for Ray Serve: the number of replicas for a load.

Serve calls the policy and applies the bounds and delays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config.serve_config import ServeConfig

LOAD = "load"
"""The load that a replica reports. Of a Router: running and waiting requests, or the equivalent of
its token rate (`cluster.replica.report`). Of a draft worker: the part of the time that it computes.

Serve's own metric also counts calls without cost for the engine, such as statistics streams.
"""

NEEDED = "replicas_needed"
"""The number of replicas for the objective `slo`, by the ControlPlane (`cluster.control`), which
sees all replicas; each Router reports the last that it has received."""

_LOOK_BACK_S = 12.0  # must exceed Serve's report interval of 10 s
_SLACK = 0.8
"""A replica is removed if the load of the others stays below this share of their target. Without
this hysteresis a load at the threshold would add and remove a replica indefinitely."""

_NEEDED_AT_S = "replicas_needed_at_s"
_HOLD_S = 60.0
"""For how long the last number for the objective counts while no Router has one, as after a restart
of the ControlPlane, which needs time to count again."""


def autoscaling_config(config: ServeConfig) -> AutoscalingConfig | None:
    """Return the configuration of Serve's autoscaler; None for a fixed number of replicas."""
    if config.max_replicas is None:
        return None
    target = config.target_requests_per_replica
    return scaling(config, config.min_replicas, config.max_replicas, target)


def scaling(config: ServeConfig, fewest: int, most: int, target: float) -> AutoscalingConfig:
    """Return the configuration for a deployment of the service. target: load of a replica."""
    return AutoscalingConfig(
        min_replicas=fewest,
        max_replicas=most,
        target_ongoing_requests=target,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:num_replicas"),
    )


def num_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas, and the policy state: the last number for the objective.

    It is the one that the objective needs, as far as that is known, otherwise that for the load. No
    replica is removed before all replicas have reported their load, and that number if it decides:
    the ControlPlane does not count what a Router that lacks it serves.
    """
    loads: Mapping[Any, float] = (context.aggregated_metrics or {}).get(LOAD, {})
    reported = (context.raw_metrics or {}).get(NEEDED, {})
    needed = [series[-1].value for series in reported.values() if series]
    current, state = context.target_num_replicas, _last_needed(context, needed)
    wanted = state[NEEDED] if state else _for_load(context, sum(loads.values()))
    num_reported = min(len(loads), len(needed)) if state else len(loads)
    if wanted < current and num_reported < context.current_num_replicas:
        return current, state
    return wanted, state


def _last_needed(context: AutoscalingContext, needed: Sequence[float]) -> dict[str, Any]:
    """Return the number for the objective and its time; empty where it is not known, or too old.

    needed: the latest number of each Router that has one.
    """
    if needed:
        return {NEEDED: round(max(needed)), _NEEDED_AT_S: context.current_time}
    before = context.policy_state or {}
    is_held = context.current_time - before.get(_NEEDED_AT_S, -math.inf) < _HOLD_S
    return {key: before[key] for key in (NEEDED, _NEEDED_AT_S)} if is_held else {}


def _for_load(context: AutoscalingContext, load: float) -> int:
    """Return the number for a load, with hysteresis."""
    target: float = context.config.target_ongoing_requests
    current: int = context.target_num_replicas
    needed, kept = math.ceil(load / target), math.ceil(load / (target * _SLACK))
    return max(needed, min(current, max(1, kept)))
