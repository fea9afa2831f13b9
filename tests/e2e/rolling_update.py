"""Updates a service with two replicas while a client sends requests; prints the results as JSON.

A separate program, because Ray reads its token from the environment at import.
"""

import json
import sys
import threading
import time
from dataclasses import replace

from cluster.config.serve_config import ServeConfig
from cluster.serve.startup import ServedModel, deploy, running_service
from cluster.workers.ray.resources import LocatedModels, memory_per_replica
from specdec.client import Client, ClientError
from specdec.engine.models.model_resolution import resolve_models
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import free_ports

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class ShortRequests:
    """Client that sends requests in a loop on a thread, and records the outputs and errors."""

    def __init__(self, address):
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers, self.errors = [], []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        with Client(self._address, timeout_s=60) as client:
            while not self._stop.is_set():
                try:
                    self.answers.append(client.generate("The river", SHORT).token_ids)
                except ClientError as error:
                    self.errors.append(error.code.name)


def replica_names():
    """Return the names of the Router actors; a new replica has a new one."""
    from ray.util import list_named_actors

    from cluster.control.peers import ROUTER

    named = list_named_actors(all_namespaces=True)
    return {each["name"] for each in named if f"#{ROUTER}#" in each["name"]}


def update(config):
    """Start the service, and change one of its settings."""
    memory_bytes = memory_per_replica(config)
    with running_service(config, lambda line: None):
        before = replica_names()
        with ShortRequests(f"127.0.0.1:{config.grpc_port}") as requests:
            started_at = time.monotonic()
            directories = resolve_models(config, lambda line: None)
            found = LocatedModels(directories, memory_bytes, config.most_replicas)
            deploy([ServedModel(replace(config, max_num_seqs=32), found)])
            took_s = time.monotonic() - started_at
        return {
            "before": sorted(before),
            "after": sorted(replica_names()),
            "took_s": took_s,
            "num_answers": len(requests.answers),
            "num_different_answers": len(set(requests.answers)),
            "errors": requests.errors,
        }


if __name__ == "__main__":
    grpc_port, http_port = free_ports(2)
    ports = {"grpc_port": grpc_port, "http_port": http_port}
    outcome = update(ServeConfig(model=sys.argv[1], ingress="serve", num_replicas=2, **ports))
    print(json.dumps(outcome))
