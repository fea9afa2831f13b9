"""Two replicas: one is lost or replaced, and clients do not notice."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import psutil
import pytest
from ray.util import list_named_actors

from cluster.config import ServeConfig
from cluster.deployment import ROUTER
from cluster.models import resolve_models
from cluster.service import deploy
from cluster.service import running_service as service_of_this_process
from specdec.client import Client, ClientError
from specdec.sampling_params import SamplingParams
from tests.e2e.conftest import free_ports, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]

NUM_STREAMS = 8
LONG = SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def routers(service):
    return [each for each in service.descendants() if "ServeReplica" in command_of(each)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def test_streams_of_a_router_that_is_killed_go_on_with_the_other(tiny_model_dir, tmp_path):
    flags = ["--ingress", "serve", "--num-replicas", "2"]
    with (
        running_service(tiny_model_dir, tmp_path / "log", *flags) as service,
        Client(service.grpc_address, timeout_s=120) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        assert len(routers(service)) == 2
        streams = [client.generate_stream(f"The river {i}", LONG) for i in range(NUM_STREAMS)]
        firsts = [next(stream) for stream in streams]
        routers(service)[0].kill()
        others = list(pool.map(list, streams))
        assert len(routers(service)) >= 1
        num_resumed = 0
        for i, (first, rest) in enumerate(zip(firsts, others, strict=True)):
            chunks = [first, *rest]
            undisturbed = client.generate(f"The river {i}", replace(LONG, seed=first.seed))
            assert sum((each.token_ids for each in chunks), ()) == undisturbed.token_ids
            assert "".join(each.text for each in chunks) == undisturbed.text
            assert chunks[-1].usage.completion_tokens == 400
            num_resumed += any(each.seed is not None for each in chunks[1:-1])
        assert 0 < num_resumed < NUM_STREAMS


def test_a_lost_router_is_told_as_unavailable(tiny_model_dir, tmp_path):
    """Serve's proxy would say INTERNAL, and quote an exception."""
    with (
        running_service(tiny_model_dir, tmp_path / "log", "--ingress", "serve") as service,
        Client(service.grpc_address, timeout_s=120) as client,
    ):
        stream = client.generate_stream("The river", LONG, resume=False)
        next(stream)
        routers(service)[0].kill()
        with pytest.raises(ClientError, match="the replica that answered is lost") as error:
            list(stream)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE


class ShortRequests:
    """A client that asks again and again, on a thread, and notes what it is answered."""

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
                    self.errors.append(error)


def replica_names():
    """Each is made anew with its replica."""
    named = list_named_actors(all_namespaces=True)
    return {each["name"] for each in named if f"#{ROUTER}#" in each["name"]}


def test_an_update_replaces_one_replica_after_the_other(tiny_model_dir, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # and so as it was when the test ends
    grpc_port, http_port = free_ports(2)
    config = ServeConfig(
        model=str(tiny_model_dir),
        ingress="serve",
        num_replicas=2,
        grpc_port=grpc_port,
        http_port=http_port,
    )
    with service_of_this_process(config, print):
        before = replica_names()
        with ShortRequests(f"127.0.0.1:{grpc_port}") as requests:
            began_at = time.monotonic()
            deploy(replace(config, max_num_seqs=32), resolve_models(config, print))
            took_s = time.monotonic() - began_at
        after = replica_names()
    print(f"{len(requests.answers)} answers, {len(requests.errors)} errors in {took_s:.0f} s")
    assert len(before) == len(after) == 2
    assert not before & after
    assert len(set(requests.answers)) == 1
    assert {error.code for error in requests.errors} <= {grpc.StatusCode.UNAVAILABLE}


def test_load_adds_a_replica_and_calm_takes_it_away(tiny_model_dir, tmp_path):
    flags = ["--ingress", "serve", "--max-replicas", "2", "--target-requests-per-replica", "2"]
    delays = ["--upscale-delay-s", "1", "--downscale-delay-s", "5"]
    with running_service(tiny_model_dir, tmp_path / "log", *flags, *delays) as service:
        assert len(routers(service)) == 1
        calm = threading.Event()
        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(ask_until, calm, service.grpc_address) for _ in range(6)]
            added_s = seconds_until(lambda: len(routers(service)) == 2)
            calm.set()
            assert all(client.result() > 0 for client in clients)
        removed_s = seconds_until(lambda: len(routers(service)) == 1)
        print(f"added after {added_s:.0f} s of load, gone after {removed_s:.0f} s of calm")


def ask_until(calm, address):
    """Asks for one long completion after the other, and returns how many came."""
    count = 0
    with Client(address, timeout_s=60) as client:
        while not calm.is_set():
            assert client.generate("The river", LONG).usage.completion_tokens == 400
            count += 1
    return count


def seconds_until(condition, timeout_s=150.0):
    began_at = time.monotonic()
    while not condition():
        assert time.monotonic() - began_at < timeout_s
        time.sleep(0.5)
    return time.monotonic() - began_at
