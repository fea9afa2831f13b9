"""Peer in its own process, as a contender."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.peers.catalog import Launch
from benchmarks.peers.driver_loop import decode_measurement, encode_workload
from benchmarks.peers.environments import PeerUnavailableError
from benchmarks.workloads import Measurement, Workload

_ROOT = Path(benchmarks.__file__).parent.parent
_STOP_TIMEOUT_S = 20.0
_TAIL_CHARS = 400


@dataclass(frozen=True)
class Loaded:
    """Report of a peer once it is loaded."""

    versions: Mapping[str, str]
    load_s: float


class PeerProcess:
    """Process of a peer: loads on entering the context, then measures. Sleeps in between."""

    def __init__(self, launch: Launch, log: Path) -> None:
        """Prepare the process. log: file for its standard error and all output except answers."""
        self._launch = launch
        self._log = log

    def __enter__(self) -> PeerProcess:
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [
                    str(self._launch.python),
                    "-m",
                    self._launch.module,
                    json.dumps(dict(self._launch.settings)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_ROOT,
                env={**os.environ, **self._launch.variables, "PYTHONPATH": str(_ROOT)},
            )
        try:
            self.loaded = Loaded(**self._receive())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload once. Raises PeerUnavailableError if the peer ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(encode_workload(workload)) + "\n")
        self._process.stdin.flush()
        return decode_measurement(self._receive())

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        tail = " ".join(self._log.read_text("utf-8", errors="replace")[-_TAIL_CHARS:].split())
        raise PeerUnavailableError(f"the process ended, see {self._log}: {tail}")

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
