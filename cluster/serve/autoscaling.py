"""How many replicas the load calls for. Serve asks, and sees to bounds and delays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config.serve_config import ServeConfig

OPEN_REQUESTS = "open_requests"
"""The load that a replica reports (`cluster.replica.report`): requests that it decodes, prefills or
keeps waiting, or as many as its rate of tokens is worth.

Serve's own count would take in calls that cost the engine nothing, such as watches.
"""

_LOOK_BACK_S = 12.0  # Serve wants more than its own period of reports, 10
_SLACK = 0.8
"""A replica is given up once the others would stay below this share of their target: a load on the
border would otherwise add and take away one for ever."""


def autoscaling_config(config: ServeConfig) -> AutoscalingConfig | None:
    """What Serve's autoscaler is told; None where the number of replicas is fixed."""
    if config.max_replicas is None:
        return None
    return AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_requests_per_replica,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:num_replicas"),
    )


def num_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number that the load calls for, and no state of its own.

    None is given up while a replica has yet to report, since its load is not known.
    """
    loads: Mapping[Any, float] = (context.aggregated_metrics or {}).get(OPEN_REQUESTS, {})
    target, load = context.config.target_ongoing_requests, sum(loads.values())
    current = context.target_num_replicas
    needed, kept = math.ceil(load / target), math.ceil(load / (target * _SLACK))
    if needed > current:
        return needed, {}
    if kept < current and len(loads) >= context.current_num_replicas:
        return max(1, kept), {}
    return current, {}
