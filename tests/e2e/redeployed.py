"""Removes a replica and then changes a setting under sixteen streams; prints the results as JSON.

Statistics are watched meanwhile, which Serve waits for.

A separate program, because Ray reads its token from the environment at import.
"""

import json
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

from cluster.config.serve_config import ServeConfig
from cluster.serve.startup import ServedModel, deploy, running_service
from cluster.workers.ray.resources import LocatedModels, memory_per_replica
from specdec.client import AdminClient, Client, ClientError
from specdec.engine.models.model_resolution import resolve_models
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import free_ports

NUM_STREAMS, NUM_WATCHES = 16, 6
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Streams:
    """Sixteen clients that run streams one after another, without resuming them."""

    def __init__(self, address):
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_STREAMS)]
        self.ends = (
            Counter()
        )  # "complete", "refused CODE" before the first token, or "broken CODE" after it
        self.num_open = 0

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        while self.num_open < NUM_STREAMS:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self):
        with Client(self._address, timeout_s=120) as client:
            while not self._stop.is_set():
                self.ends[self._one(client)] += 1

    def _one(self, client):
        num_tokens = 0
        try:
            for chunk in client.generate_stream("The river", LONG, resume=False):
                self.num_open += num_tokens == 0
                num_tokens += len(chunk.token_ids)
        except ClientError as error:
            time.sleep(0.2)
            return f"{'broken' if num_tokens else 'refused'} {error.code.name}"
        finally:
            self.num_open -= num_tokens > 0
        assert num_tokens == LONG.max_tokens
        return "complete"


class Watches:
    """Clients that watch the statistics, on both replicas at first."""

    def __init__(self, address):
        self._address = address
        self._open = threading.Barrier(NUM_WATCHES + 1)
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_WATCHES)]
        self.ends = Counter()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self._open.wait(60)
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join()

    def _run(self):
        with AdminClient(self._address) as client:
            watch = client.watch(60.0)
            next(watch)
            self._open.wait(60)
            try:
                list(watch)
            except ClientError as error:
                self.ends[error.message.rpartition(": ")[2]] += 1


def ignore(line):
    """Ignore progress messages."""


def change(config):
    """Count the outcomes of streams while a replica is removed, and while the other is replaced.

    "watches": the ends of watches. "replicas": how many are listed, and lost, at last.
    """
    memory_bytes = memory_per_replica(config)
    ends, address = {}, f"127.0.0.1:{config.grpc_port}"
    with running_service(config, ignore):
        found = LocatedModels(resolve_models(config, ignore), memory_bytes, config.most_replicas)
        one = replace(config, num_replicas=1)
        with Watches(address) as watches:
            for name, after in (("fewer", one), ("changed", replace(one, max_num_seqs=32))):
                with Streams(address) as streams:
                    deploy([ServedModel(after, found)])
                ends[name] = dict(streams.ends)
        with AdminClient(address) as admin:
            while len((status := admin.status()).replicas) > 1 and not status.num_lost_replicas:
                time.sleep(1)
    replicas = len(status.replicas), status.num_lost_replicas
    return {"streams": ends, "watches": watches.ends, "replicas": replicas}


if __name__ == "__main__":
    grpc_port, http_port = free_ports(2)
    ports = {"grpc_port": grpc_port, "http_port": http_port}
    drain = {"drain_timeout_s": 60.0, "max_model_len": 512, "speculative_config": None}
    config = ServeConfig(model=sys.argv[1], ingress="serve", num_replicas=2, **ports, **drain)
    print(json.dumps(change(config)))
