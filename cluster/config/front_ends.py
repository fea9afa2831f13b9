"""The number of front ends, which `cluster.api.front_ends` starts."""

from __future__ import annotations

from specdec.config.fields import Limit
from specdec.config.hardware import available_cpus

MAX_FRONT_ENDS = 16

_NUMBERS = tuple(map(str, range(MAX_FRONT_ENDS + 1)))

FRONT_ENDS = Limit(
    f"auto, or a whole number from 0 to {MAX_FRONT_ENDS}",
    lambda value: value == "auto" or (type(value) in (int, str) and str(value) in _NUMBERS),
    brief=f"auto, or 0 to {MAX_FRONT_ENDS}",
)


def front_end_count(frontends: str | int, device: str) -> int:
    """Return the number for a setting, on a machine like this one."""
    if frontends != "auto":
        return int(frontends)
    if device == "cpu":  # its cores are for the model
        return 0
    num_cores = available_cpus()
    return 4 if num_cores >= 16 else 2 if num_cores >= 8 else 0
