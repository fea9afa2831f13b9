"""Tests that on a signal running requests finish, new ones are rejected, and no process is left."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STREAMS = 16
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)


def health_of(service):
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status


@pytest.mark.parametrize("ingress", ["embedded", "serve"])
def test_sixteen_streams_finish_and_new_requests_are_rejected(tiny_model_dir, tmp_path, ingress):
    flags = ["--ingress", ingress, "--drain-timeout-s", "60", "--max-model-len", "512"]
    with (
        running_service(tiny_model_dir, tmp_path / "log", *flags) as service,
        Client(service.grpc_address) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        streams = [
            client.generate_stream("The river", LONG, resume=False) for _ in range(NUM_STREAMS)
        ]
        for stream in streams:
            next(stream)
        rest = pool.map(list, streams)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health_of(service) == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert httpx.get(service.http_url + "/ready", timeout=30).status_code == 503
        with pytest.raises(ClientError, match="draining") as error:
            client.generate("The river", LONG)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        for *_, last in rest:
            assert last.usage.completion_tokens == 450


def test_a_second_signal_aborts_running_requests(tiny_model_dir, tmp_path):
    flags = ["--drain-timeout-s", "100"]
    with (
        running_service(tiny_model_dir, tmp_path / "log", *flags) as service,
        Client(service.grpc_address) as client,
    ):
        # The last streams begin when the first ones end, so that they are running on any machine.
        several = replace(LONG, temperature=1.0, n=8)
        streams = [client.generate_stream("The river", several, resume=False) for _ in range(20)]
        for stream in streams:
            next(stream)
        service.process.send_signal(signal.SIGINT)
        wait_until(lambda: "press Ctrl-C again to abort" in service.log.read_text())
        service.process.send_signal(signal.SIGINT)
        with pytest.raises(ClientError) as error:
            list(streams[-1])
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
