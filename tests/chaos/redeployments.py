"""Redeploys, updates and kills one of two models, again and again, while clients ask for both.

No request for the other model may fail, nor /metrics; the changed one is 503 until it is back. A
separate program, because Ray reads its token from the environment at import:
`python -m tests.chaos.redeployments MODEL STATE_DIRECTORY NUM_ROUNDS SEED` prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.serve.startup import ServedModel, deploy, running_service
from cluster.workers.ray.resources import LocatedModels, memory_per_replica
from specdec.client import Client, ClientError
from specdec.engine.models.model_resolution import resolve_models
from specdec.types.sampling.sampling_params import SamplingParams
from tests.chaos.history import violations
from tests.chaos.traffic import HAS_DEADLINE, REFUSALS, Outcome, Traffic, processes, status_of
from tests.e2e.conftest import free_ports

STAYS, CHANGES = "stays", "changes"
NUM_CLIENTS = 3  # of each model
PAUSE_S = 3.0
ABSENCE_S = 8.0
"""Longer than a Router takes for current what it knows of the other applications."""
LIMIT_S = 120.0
POLL_S = 0.3
MAX_NUM_SEQS = (32, 48)
_PROBE = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


class Polls:
    """Polls of the service, until they are stopped. expected: statuses that are no violation."""

    def __init__(self, poll: Callable[[], httpx.Response], expected: set[str]) -> None:
        self.statuses: Counter[str] = Counter()
        self._poll, self._expected = poll, expected
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Polls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def strange(self) -> list[str]:
        """Return a line for each status that is not expected."""
        return [
            f"{count} x {status}"
            for status, count in self.statuses.items()
            if status not in self._expected
        ]

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                response = self._poll()
            except httpx.HTTPError as error:
                self.statuses[repr(error)] += 1
            else:
                is_ok = response.status_code == 200
                self.statuses["200" if is_ok else status_of(response)] += 1


class Neighbour:
    """The model that is changed, and the ways to change it."""

    def __init__(self, config: ServeConfig) -> None:
        memory_bytes = memory_per_replica(config, 2)
        self._config, self._number = config, 0
        self._found = LocatedModels(resolve_models(config, lambda line: None), memory_bytes, 2)

    def redeploy(self) -> None:
        """Delete its application, and deploy it again after a while."""
        serve.delete(CHANGES)
        time.sleep(ABSENCE_S)
        self._deploy(self._config)

    def update(self) -> None:
        """Change one of its settings, which replaces its replica."""
        self._number += 1
        max_num_seqs = MAX_NUM_SEQS[self._number % len(MAX_NUM_SEQS)]
        self._deploy(replace(self._config, max_num_seqs=max_num_seqs))

    def kill(self) -> None:
        """Send SIGKILL to its Router and its ControlPlane, which Serve starts again."""
        for each in processes(psutil.Process(), f"ServeReplica:{CHANGES}:"):
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def _deploy(self, config: ServeConfig) -> None:
        deploy([ServedModel(config, self._found)])


def run(config: ServeConfig, num_rounds: int, seed: int) -> dict[str, object]:
    """Start the service, and change one of its models in each way `num_rounds` times."""
    url, address = f"http://127.0.0.1:{config.http_port}", f"127.0.0.1:{config.grpc_port}"
    changing = replace(config, served_model_name=CHANGES)
    polls = {
        "/metrics": Polls(lambda: httpx.get(url + "/metrics", timeout=10), {"200"}),
        "by name": Polls(lambda: _complete(url), {"200", "503"}),
        "by path": Polls(lambda: _complete(f"{url}/{CHANGES}"), {"200", "503"}),
    }
    with running_service(config, lambda line: None, others=[changing]), ExitStack() as stack:
        neighbour = Neighbour(changing)
        staying, changed = (Traffic(address, url, seed, model) for model in (STAYS, CHANGES))
        for each in (staying, changed):
            each.learn()
            each.start(NUM_CLIENTS)
            stack.callback(each.stop)
        for polled in polls.values():
            stack.enter_context(polled)
        changes = (neighbour.redeploy, neighbour.update, neighbour.kill) * num_rounds
        recovered_s = [(each.__name__, _recovery_s(each, address)) for each in changes]
    late = [f"no answer after {name}" for name, took_s in recovered_s if took_s >= LIMIT_S]
    strange = [f"{name}: {each}" for name, polled in polls.items() for each in polled.strange()]
    return {
        "recovered_s": recovered_s,
        "polls": {name: polled.statuses for name, polled in polls.items()},
        "ends": {each.model: _ends(each.outcomes) for each in (staying, changed)},
        "violations": late + strange + _violations(staying) + _violations(changed, REFUSALS),
    }


def _complete(url: str) -> httpx.Response:
    body = {"model": CHANGES, "prompt": "The river", "max_tokens": 1}
    return httpx.post(url + "/v1/completions", json=body, timeout=60)


def _recovery_s(change: Callable[[], None], address: str) -> float:
    """Change the model after a pause; return the seconds until it answers again."""
    time.sleep(PAUSE_S)
    change()
    began_at_s = time.monotonic()
    while time.monotonic() - began_at_s < LIMIT_S:
        with suppress(ClientError), Client(address, timeout_s=10) as client:
            client.generate("The river", _PROBE, model=CHANGES)
            break
        time.sleep(POLL_S)
    return round(time.monotonic() - began_at_s, 1)


def _ends(outcomes: Sequence[Outcome]) -> Counter[str]:
    return Counter(each.call.ends[0].status for each in outcomes if each.call.ends)


def _violations(traffic: Traffic, refusals: frozenset[str] = frozenset()) -> list[str]:
    """Return what is wrong with the calls. refusals: how they may end early."""
    late = refusals | {"DEADLINE_EXCEEDED"}
    return traffic.overdue + [
        f"{traffic.model}: {fault}"
        for each in traffic.outcomes
        for fault in violations([each.call], late if each.kind == HAS_DEADLINE else refusals)
    ]


if __name__ == "__main__":
    model, state, num_rounds, seed = sys.argv[1:]
    grpc_port, http_port = free_ports(2)
    config = ServeConfig(
        model=model,
        served_model_name=STAYS,
        ingress="serve",
        max_model_len=512,
        grpc_port=grpc_port,
        http_port=http_port,
        state_dir=Path(state),
    )
    report = run(config, int(num_rounds), int(seed))
    print(json.dumps(report))
