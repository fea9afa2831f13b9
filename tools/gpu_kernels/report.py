"""The record of what the compiled GPU kernels take, and its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

REPORT = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu-kernels.json"

MAX_REGISTERS = 255
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
"""Shared memory that a program may use (CUDA C++ Programming Guide, table of technical limits)."""
MAX_SPILLED_BYTES = 64
"""Of a thread. Below 255 registers ptxas spills a few bytes so that more warps run at once."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. registers: of each thread."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


Kernels = Mapping[str, Mapping[str, Resources]]
"""Resources by name of the kernel and by target, such as sm_80."""


def faults_of(found: Kernels, recorded: Kernels) -> list[str]:
    """Return a line for each kernel that takes more than it may, or that is not recorded.

    recorded: of the report. A kernel may not spill more than it did when it was recorded.
    """
    lines = []
    for name, targets in found.items():
        for target, used in targets.items():
            where, before = f"{name} on {target}", recorded.get(name, {}).get(target)
            spilled = MAX_SPILLED_BYTES
            if before is None:
                lines.append(f"{where} is not recorded: run make gpu-kernels")
            else:
                spilled = min(spilled, before.spilled_bytes)
            if used.spilled_bytes > spilled:
                lines.append(f"{where} spills {used.spilled_bytes} bytes (limit {spilled})")
            if used.shared_bytes > (limit := MAX_SHARED_BYTES[target]):
                lines.append(f"{where} needs {used.shared_bytes} bytes of shared memory ({limit})")
            if used.registers > MAX_REGISTERS:
                lines.append(f"{where} needs {used.registers} registers (limit {MAX_REGISTERS})")
    return lines


def read_report() -> dict[str, dict[str, Resources]]:
    """Return the recorded kernels."""
    kernels = json.loads(REPORT.read_text(encoding="utf-8"))["kernels"]
    return {
        name: {target: Resources(**used) for target, used in targets.items()}
        for name, targets in kernels.items()
    }


def write_report(found: Kernels, compiler: str) -> None:
    """Record compiled kernels. compiler: version of Triton."""
    report = {
        "command": "make gpu-kernels",
        "triton": compiler,
        "kernels": {
            name: {target: asdict(used) for target, used in targets.items()}
            for name, targets in found.items()
        },
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
