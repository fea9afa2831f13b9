"""Kernels of some work by time, and the launches of each, as torch's profiler sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.parts import Result, failure

_ROUNDS = 3
_MOST_KERNELS = 12
_NAME_CHARS = 90


def profile(work: Callable[[], object], device: torch.device) -> Result:
    """Return the kernels that take the most time, per run of the work; on a CPU operators.

    device_ms: sum of all kernels. kernels: of each name, launches and milliseconds. Only the error,
    where the profiler fails: a time that was measured must not be lost for it.
    """
    work()
    try:
        return _profile(work, device)
    except (RuntimeError, AssertionError) as error:
        return {"error": failure(error)["error"]}


def _profile(work: Callable[[], object], device: torch.device) -> Result:
    is_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(_ROUNDS):
            work()
        if is_gpu:
            torch.cuda.synchronize(device)
    times_us, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in profiler.key_averages():
        name = event.key[:_NAME_CHARS]
        time_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        if time_us > 0 and (event.device_type.name == "CUDA" or not is_gpu):
            times_us[name] += time_us
            launches[name] += event.count
    longest = sorted(times_us, key=lambda name: -times_us[name])[:_MOST_KERNELS]
    return {
        "device_ms": round(sum(times_us.values()) / _ROUNDS / 1e3, 4),
        "launches": sum(launches.values()) // _ROUNDS,
        "kernels": {
            name: {
                "launches": launches[name] / _ROUNDS,
                "ms": round(times_us[name] / _ROUNDS / 1e3, 4),
            }
            for name in longest
        },
    }
