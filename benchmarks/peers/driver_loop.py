"""Peer side: a contender driven over standard input and output, with one JSON object per line.

Runs under a peer's own interpreter, so it imports the standard library only. The first answer
reports that the peer is loaded; then each input line is a workload, answered by a measurement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TextIO

from benchmarks.workloads import Contender, Measurement, StreamRecord, Workload

Settings = Mapping[str, Any]
"""Settings of a driver: `model` (a path), `num_threads`, and keys specific to the driver."""


def serve(make: Callable[[Settings], Contender], packages: tuple[str, ...]) -> None:
    """Load the contender described by the first argument, and measure until input ends.

    packages: those whose versions are reported.
    """
    answers = _claim_output()
    started_at = time.perf_counter()
    contender = make(json.loads(sys.argv[1]))
    loaded = {"versions": {name: version(name) for name in packages}}
    _send(answers, {**loaded, "load_s": time.perf_counter() - started_at})
    for line in sys.stdin:
        _send(answers, encode_measurement(contender.measure(decode_workload(json.loads(line)))))


def encode_workload(workload: Workload) -> dict[str, Any]:
    """Convert to plain data."""
    return {
        "prompts": workload.prompts,
        "max_tokens": workload.max_tokens,
        "method": workload.method,
    }


def decode_workload(message: Mapping[str, Any]) -> Workload:
    """Convert from plain data; a peer opens all streams at once."""
    prompts = tuple(tuple(prompt) for prompt in message["prompts"])
    return Workload(prompts, message["max_tokens"], message["method"])


def encode_measurement(measurement: Measurement) -> dict[str, Any]:
    """Convert to plain data."""
    return {
        "seconds": measurement.seconds,
        "streams": [
            {"token_ids": each.token_ids, "arrivals_s": each.arrivals_s}
            for each in measurement.streams
        ],
    }


def decode_measurement(message: Mapping[str, Any]) -> Measurement:
    """Convert from plain data. Peers do not report their acceptance length."""
    streams = tuple(
        StreamRecord(tuple(each["token_ids"]), tuple(each["arrivals_s"]))
        for each in message["streams"]
    )
    return Measurement(message["seconds"], streams, mean_acceptance_length=None)


def _claim_output() -> TextIO:
    """Reserve standard output for answers; all other output goes to the log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _send(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
