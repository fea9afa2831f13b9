"""Command line of `tools.gpu_kernels`."""

from __future__ import annotations

import argparse
import os
import sys

from tools import gpu_kernels
from tools.gpu_kernels.report import faults_of, read_report, write_report


def main(arguments: list[str] | None = None) -> int:
    """Compile the kernels; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="tools.gpu_kernels", description=gpu_kernels.__doc__)
    parser.add_argument("action", choices=("update", "check"))
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported, or nothing is compiled
    import triton

    from tools.gpu_kernels.compiler import compile_all

    found = compile_all()
    if options.action == "update":
        write_report(found, triton.__version__)
        return 0
    faults = faults_of(found, read_report())
    for line in faults:
        print(line)
    count = sum(len(targets) for targets in found.values())
    print(f"{count} kernels compiled, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
