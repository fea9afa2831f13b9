"""Runs the chaos suite: the real service under random faults, and the check of its history.

Prints for each service a table of faults with the times of recovery, and a JSON line. Exits with
1 after a violation. The faults and their order are a function of the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.suite import NODES, SERVICES, Report, run
from tests.specdec.tiny import tiny_llama_dir

_SERVICE = f"one service only; default: each but {NODES}, which needs root"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--service", choices=[*SERVICES, NODES], help=_SERVICE)
    parser.add_argument("--only", default="", help="names of faults to choose from, by commas")
    arguments = parser.parse_args()
    only = tuple(filter(None, arguments.only.split(",")))
    names = [arguments.service] if arguments.service else list(SERVICES)
    seconds, num_violations = arguments.minutes * 60 / len(names), 0
    with tempfile.TemporaryDirectory(prefix="specdec-chaos-") as directory:
        model = tiny_llama_dir(Path(directory) / "model")
        for name in names:
            report = run(name, model, Path(directory), seconds, arguments.seed, only)
            _print(report)
            num_violations += len(report.violations)
    return 1 if num_violations else 0


def _print(report: Report) -> None:
    for line in report.table():
        print(line)
    for violation in report.violations:
        print(f"VIOLATION: {violation}")
    print(json.dumps(report.summary()))


if __name__ == "__main__":
    sys.exit(main())
