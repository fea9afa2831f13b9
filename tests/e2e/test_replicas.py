"""Tests of two replicas, of which one is lost or replaced."""

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import httpx
import psutil
import pytest

from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STREAMS = 8
LONG = SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True)


def routers(service):
    return [each for each in service.descendants() if ":Router" in command_of(each)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""


def test_streams_of_a_killed_router_resume_on_the_other(tiny_model_dir, tmp_path):
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


def test_a_lost_router_is_reported_as_unavailable(tiny_model_dir, tmp_path):
    """Serve's proxy alone would return INTERNAL with an exception as its details."""
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


def test_an_update_replaces_one_replica_after_the_other(tiny_model_dir):
    command = [sys.executable, "-m", "tests.e2e.rolling_update", str(tiny_model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    update = json.loads(done.stdout.splitlines()[-1])
    print(update)
    assert len(update["before"]) == len(update["after"]) == 2
    assert not set(update["before"]) & set(update["after"])
    assert update["num_answers"] > 0
    assert update["num_different_answers"] == 1
    assert set(update["errors"]) <= {"UNAVAILABLE"}


def test_sixteen_streams_survive_the_removal_of_replicas(tiny_model_dir):
    command = [sys.executable, "-m", "tests.e2e.redeployed", str(tiny_model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    print(outcome)
    for each in outcome["streams"].values():
        assert each.pop("complete") >= 16
        assert set(each) <= {"refused UNAVAILABLE"}, "a running stream did not complete"
    assert outcome["watches"] == {"the service is draining; watch another replica": 6}
    assert outcome["replicas"] == [1, 0], "a replica was killed before it had left"


def test_replicas_are_added_under_load_and_removed_when_idle(tiny_model_dir, tmp_path):
    flags = ["--ingress", "serve", "--max-replicas", "2", "--target-requests-per-replica", "2"]
    delays = ["--upscale-delay-s", "1", "--downscale-delay-s", "5"]
    with running_service(tiny_model_dir, tmp_path / "log", *flags, *delays) as service:
        assert len(routers(service)) == 1
        is_done = threading.Event()
        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(ask_until, is_done, service.grpc_address) for _ in range(6)]
            added_s = seconds_until(lambda: len(routers(service)) == 2)
            is_done.set()
            assert all(client.result() > 0 for client in clients)
        removed_s = seconds_until(lambda: len(routers(service)) == 1)
        print(f"added after {added_s:.0f} s of load, removed after {removed_s:.0f} s without")


def test_replicas_are_added_for_an_objective(tiny_model_dir, tmp_path):
    """Each replica serves one request at a time; the load alone adds none."""
    flags = ["--ingress", "serve", "--max-replicas", "2", "--upscale-delay-s", "1"]
    flags += ["--slo", "ttft:1000 tpot:100", "--max-num-seqs", "1"]
    flags += ["--target-requests-per-replica", "1000"]
    with running_service(tiny_model_dir, tmp_path / "log", *flags) as service:
        is_done = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            clients = [pool.submit(ask_until, is_done, service.grpc_address) for _ in range(2)]
            added_s = seconds_until(lambda: len(routers(service)) == 2)
            is_done.set()
            assert all(client.result() > 0 for client in clients)
        text = httpx.get(f"{service.http_url}/metrics").text
        [needed] = re.findall(r"^specdec:fleet_replicas_needed\{.*\} (\d+)", text, re.MULTILINE)
        assert int(needed) >= 2
        print(f"added after {added_s:.0f} s of load")


def ask_until(is_done, address):
    """Send long requests in a loop; return the number of completions."""
    count = 0
    with Client(address, timeout_s=60) as client:
        while not is_done.is_set():
            assert client.generate("The river", LONG).usage.completion_tokens == 400
            count += 1
    return count


def seconds_until(condition, timeout_s=150.0):
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < timeout_s
        time.sleep(0.5)
    return time.monotonic() - started_at
