"""Updates a service with two replicas, again and again, under the mixed traffic of the chaos suite.

A separate program, because Ray reads its token from the environment at import:
`python -m tests.chaos.updates MODEL STATE_DIRECTORY NUM_UPDATES SEED` prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from cluster.config.serve_config import ServeConfig
from cluster.serve.startup import ServedModel, deploy, running_service
from cluster.workers.ray.resources import LocatedModels, memory_per_replica
from specdec.engine.models.model_resolution import resolve_models
from tests.chaos.history import violations
from tests.chaos.suite import NUM_CLIENTS
from tests.chaos.traffic import BROKEN, REFUSALS, Traffic
from tests.e2e.conftest import free_ports

PAUSE_S = 3.0
MAX_NUM_SEQS = (32, 48, 64)


def update(config: ServeConfig, num_updates: int, seed: int) -> dict[str, object]:
    """Start the service, and change one of its settings `num_updates` times."""
    memory_bytes, took_s = memory_per_replica(config), []
    with running_service(config, lambda line: None):
        http_url = f"http://127.0.0.1:{config.http_port}"
        traffic = Traffic(f"127.0.0.1:{config.grpc_port}", http_url, seed)
        traffic.learn()
        traffic.start(NUM_CLIENTS)
        directories = resolve_models(config, lambda line: None)
        found = LocatedModels(directories, memory_bytes, config.most_replicas)
        for number in range(num_updates):
            time.sleep(PAUSE_S)
            began_at_s = time.monotonic()
            changed = replace(config, max_num_seqs=MAX_NUM_SEQS[number % len(MAX_NUM_SEQS)])
            deploy([ServedModel(changed, found)])
            took_s.append(round(time.monotonic() - began_at_s, 1))
        time.sleep(PAUSE_S)
        traffic.stop()
    calls = [each.call for each in traffic.outcomes]
    return {
        "updates_s": took_s,
        "num_calls": len(calls),
        "violations": traffic.overdue + violations(calls, REFUSALS | {BROKEN}),
    }


if __name__ == "__main__":
    model, state, num_updates, seed = sys.argv[1:]
    grpc_port, http_port = free_ports(2)
    config = ServeConfig(
        model=model,
        ingress="serve",
        num_replicas=2,
        max_model_len=512,
        grpc_port=grpc_port,
        http_port=http_port,
        state_dir=Path(state),
    )
    print(json.dumps(update(config, int(num_updates), int(seed))))
