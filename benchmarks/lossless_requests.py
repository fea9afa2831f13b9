"""Compare random requests, in random settings of an engine, with drafts and without.

Each setting has a tiny random model, a drafter, limits, and requests with any sampling parameters;
some are aborted, and in some settings speculation changes meanwhile. Tokens, texts, reasons and
log-probabilities must be equal. A setting is a function of the seed and its number.

    python -m benchmarks.lossless_requests [--seed 0] [--first 0] [--settings 10] [--method eagle3]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report_file import parse_options
from specdec.types.errors import SpecdecError
from tests.specdec.random_comparison import random_comparison, reduced
from tests.specdec.random_settings import METHODS, Checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all settings; return 0 if no request differs."""
    options, began_at_s = parse_options(_parser(), arguments), time.monotonic()
    totals = Counter(requests=0, differing=0, refused_settings=0)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory))
        for number in range(options.first, options.first + options.settings):
            totals.update(_compared(f"{options.seed}/{number}", checkpoints, options))
    seconds = round(time.monotonic() - began_at_s)
    print(json.dumps({"command": options.command, **totals, "seconds": seconds}))
    return 1 if totals["differing"] else 0


def _compared(name: str, checkpoints: Checkpoints, options: argparse.Namespace) -> dict[str, int]:
    """Compare a setting and print the outcome; return what to count."""
    comparison = random_comparison(name, options.requests, checkpoints, options.method)
    settings = comparison.settings
    try:
        outcome = comparison.run()
    except SpecdecError as error:
        print(f"{name}: {settings.family}, {settings.method}: refused: {error}", flush=True)
        return {"refused_settings": 1}
    print(f"{name}: {settings.family}, {settings.method}: {outcome}", flush=True)
    if outcome.differences:
        first = next(iter(outcome.differences))
        least = reduced(comparison, first) if options.reduce else comparison
        place = f"--seed {name.replace('/', ' --first ')} --settings 1"
        print(f"  repeat with {place}", least.settings, *least.requests, sep="\n  ", flush=True)
    return {settings.method: options.requests, **outcome.totals}


def _parser() -> argparse.ArgumentParser:
    purpose = "Compare random requests with drafts and without."
    parser = argparse.ArgumentParser(prog="benchmarks.lossless_requests", description=purpose)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first setting")
    parser.add_argument("--settings", type=int, default=10, help="number of settings")
    parser.add_argument("--requests", type=int, default=24, help="number of requests of each")
    parser.add_argument("--method", choices=METHODS, default="", help="of all settings")
    parser.add_argument("--reduce", action="store_true", help="find the least that differs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
