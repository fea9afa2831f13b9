"""Fuzzes every front door: gRPC, HTTP, command line, checkpoints, GGUF, configuration, grammars.

No input may get INTERNAL or a 5xx status but 503 and 504, leave a traceback in an answer or in the
log, or leak a KV block or a request. Prints the answers by door, and exits with 1 after a
violation. An input is a function of the seed, its door and its number.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.run import run
from tests.specdec.tiny import tiny_llama_dir


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments, began_at_s = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specdec-fuzz-") as directory:
        model = tiny_llama_dir(Path(directory) / "model")
        report = run(model, Path(directory), arguments.inputs, arguments.seed)
    for line in (*report.table(), *(f"VIOLATION: {each}" for each in report.violations)):
        print(line)
    summary = {
        "benchmark": "fuzz",
        "seed": arguments.seed,
        "inputs": report.num_inputs,
        "violations": len(report.violations),
        "seconds": round(time.monotonic() - began_at_s),
    }
    print(json.dumps(summary))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
