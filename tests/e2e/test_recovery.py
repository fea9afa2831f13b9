"""A rank that dies is noticed, its streams end with a reason, and the service comes back."""

import time

import grpc
import httpx
import psutil
import pytest

from specdec.client import Client, ClientError
from specdec.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("recovery") / "log"
    with running_service(tiny_model_dir, log, "--tensor-parallel-size", "2") as service:
        yield service


def shards(service):
    return [process for process in service.descendants() if "TargetShard" in command_of(process)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def is_ready(service):
    try:
        return httpx.get(service.http_url + "/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for_new_shards(service, old):
    """Seconds until other shards than `old` serve."""
    started_at = time.monotonic()
    while time.monotonic() - started_at < 120:
        if is_ready(service) and not {p.pid for p in shards(service)} & old:
            return time.monotonic() - started_at
        time.sleep(0.5)
    pytest.fail(f"the service did not come back: {service.log.read_text()[-2000:]}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_killed_in_the_middle_of_a_stream(service, rank):
    with Client(service.grpc_address, timeout_s=60) as client:
        before = client.generate("The river", SHORT)
        old = shards(service)
        assert len(old) == 2
        stream = client.generate_stream("The river", LONG)
        next(stream)
        psutil.Process(old[rank].pid).kill()
        with pytest.raises(ClientError) as error:
            list(stream)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
    print(f"recovered in {wait_for_new_shards(service, {p.pid for p in old}):.1f} s")
    with Client(service.grpc_address, timeout_s=60) as client:
        assert client.generate("The river", SHORT).token_ids == before.token_ids


def test_a_shard_killed_while_nothing_runs(service):
    old = shards(service)
    old[0].kill()
    print(f"recovered in {wait_for_new_shards(service, {p.pid for p in old}):.1f} s")
    with Client(service.grpc_address, timeout_s=60) as client:
        assert client.generate("The river", SHORT).usage.completion_tokens == 8
