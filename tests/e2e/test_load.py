"""Tests of the service under load: threshold, toggling, and overload."""

import asyncio
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import AdminClient, Client, SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

THRESHOLD = 6
SPECULATION = {
    "method": "draft_model",
    "num_speculative_tokens": 3,
    "speculation_threshold": THRESHOLD,
    "policy": "threshold",
}
MAX_NUM_SEQS, MAX_QUEUE_LEN = 16, 16


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("load") / "log"
    flags = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-len", str(MAX_QUEUE_LEN)]
    flags += ["--speculative-config", json.dumps(SPECULATION)]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


def report(service):
    """Return the report of the only replica, at most about a second old."""
    with AdminClient(service.grpc_address) as admin:
        [replica] = admin.status().replicas
    return replica.report


class ClosedLoop:
    """Closed loop of `num_streams` concurrent streams."""

    def __init__(self, service, num_streams):
        self._service = service
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_streams)
        self._streams = [self._pool.submit(self._run, index) for index in range(num_streams)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        for stream in self._streams:
            stream.result()
        self._pool.shutdown()

    def _run(self, index):
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        with Client(self._service.grpc_address, timeout_s=120) as client:
            while not self._stop.is_set():
                client.generate(f"The river {index}", params)


def test_the_threshold_follows_the_load_without_flapping(service):
    seen = {}
    for num_streams in (1, 4, 8, 16):
        with ClosedLoop(service, num_streams):
            time.sleep(4)
            seen[num_streams] = {report(service).is_speculation_on for _ in range(8) if pause(0.5)}
    print(f"speculation by streams: {seen}")
    assert seen == {1: {True}, 4: {True}, 8: {False}, 16: {False}}


def pause(seconds):
    time.sleep(seconds)
    return True


def test_no_flapping_at_the_threshold(service):
    """Six streams decode all the time, and a seventh starts and ends repeatedly."""
    with ClosedLoop(service, THRESHOLD):
        time.sleep(3)
        num_flips = 0
        was_on = report(service).is_speculation_on
        for _ in range(10):
            with Client(service.grpc_address, timeout_s=60) as client:
                client.generate("A visitor", SamplingParams(max_tokens=20, ignore_eos=True))
            is_on = report(service).is_speculation_on
            num_flips += is_on != was_on
            was_on = is_on
    print(f"flips while 6 to 7 requests decode: {num_flips}")
    assert num_flips <= 2


def test_two_hundred_toggles_while_eight_streams_run(service):
    toggle_while_streams_run(service, num_streams=8, num_tokens=400)


@pytest.mark.model
def test_two_hundred_toggles_of_the_demo_model(smollm2_dir, tmp_path):
    """SmolLM2 with its int8 quantization as the draft model."""
    speculation = json.dumps({**SPECULATION, "quantization": "int8"})
    flags = ["--speculative-config", speculation, "--max-model-len", "256"]
    with running_service(smollm2_dir, tmp_path / "log", *flags) as service:
        toggle_while_streams_run(service, num_streams=4, num_tokens=120)


def toggle_while_streams_run(service, num_streams, num_tokens, num_toggles=200):
    """Assert that outputs do not change, and that no draft tokens are proposed while off."""

    def stream(index):
        params = SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=num_tokens, ignore_eos=True
        )
        with Client(service.grpc_address, timeout_s=240) as client:
            return client.generate(f"The river {index}", params).token_ids

    def toggle(admin, mode):
        started_at = time.monotonic()
        version = admin.set_speculation(SpeculationChange(mode=mode)).version
        while report(service).speculation_version != version:
            time.sleep(0.02)
        return time.monotonic() - started_at

    with ThreadPoolExecutor(num_streams) as pool, AdminClient(service.grpc_address) as admin:
        undisturbed = list(pool.map(stream, range(num_streams)))
        toggle(admin, "on")
        elapsed_s = []
        while len(elapsed_s) < num_toggles:
            streams = [pool.submit(stream, index) for index in range(num_streams)]
            while not all(each.done() for each in streams):
                elapsed_s.append(toggle(admin, "off"))
                wait_for_a_step(service, streams)  # the step in flight may have drafts
                before = report(service).counts.speculation
                time.sleep(0.2)
                assert report(service).counts.speculation == before, "drafted while off"
                elapsed_s.append(toggle(admin, "on"))
                wait_for_a_step(service, streams)
            assert [each.result() for each in streams] == undisturbed
        admin.set_speculation(SpeculationChange(reset=True))
    print(
        f"{len(elapsed_s)} toggles; in force and reported after "
        f"{statistics.median(elapsed_s):.2f} s, at most {max(elapsed_s):.2f} s"
    )
    assert report(service).counts.speculation.num_accepted_tokens > 0


def test_overload_by_a_factor_of_ten(service):
    """Open loop for 30 s: rejections are immediate, and accepted requests complete."""
    params = pb.SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    replica = next(each for each in service.descendants() if "Router" in name_of(each))

    async def call(stub):
        started_at = time.monotonic()
        request = pb.GenerateRequest(text="The river", sampling=params)
        try:
            response = await stub.Generate(request, timeout=200)
        except grpc.aio.AioRpcError as error:
            return error, time.monotonic() - started_at
        return response, time.monotonic() - started_at

    async def overload(requests_per_s, seconds):
        async with grpc.aio.insecure_channel(service.grpc_address) as channel:
            stub = InferenceServiceStub(channel)
            await asyncio.gather(*(call(stub) for _ in range(4)))  # connect and warm up
            calls = []
            for _ in range(int(requests_per_s * seconds)):
                calls.append(asyncio.create_task(call(stub)))
                await asyncio.sleep(1 / requests_per_s)
            return await asyncio.gather(*calls)

    bears = _requests_per_s(service)
    memory_before = replica.memory_info().rss
    ended = asyncio.run(overload(10 * bears, 30))
    grown_mib = (replica.memory_info().rss - memory_before) / 2**20
    refused = [(each, took) for each, took in ended if isinstance(each, grpc.aio.AioRpcError)]
    answered = [each for each, _ in ended if not isinstance(each, grpc.aio.AioRpcError)]
    latencies_ms = sorted(1e3 * took for _, took in refused)
    print(
        f"bears {bears:.1f} requests/s; of {len(ended)} in 30 s {len(answered)} were answered, "
        f"{len(refused)} refused, in the median after {statistics.median(latencies_ms):.1f} ms, "
        f"95 % within {latencies_ms[int(0.95 * len(latencies_ms))]:.1f} ms; "
        f"memory grew by {grown_mib:.0f} MiB"
    )
    assert all(each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for each, _ in refused)
    assert {each.trailing_metadata()["retry-after-s"] for each, _ in refused} == {"1"}
    assert len({tuple(each.choices[0].token_ids) for each in answered}) == 1
    assert len(answered) + len(refused) == len(ended)
    assert grown_mib < 200
    assert wait_until_idle(service).kv_cache_usage == 0


def wait_for_a_step(service, streams):
    before = report(service).counts.num_generated_tokens
    while report(service).counts.num_generated_tokens == before and not all(
        s.done() for s in streams
    ):
        time.sleep(0.02)


def name_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _requests_per_s(service):
    """Measure the throughput of a closed loop with as many streams as the batch has room."""
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    with Client(service.grpc_address, timeout_s=120) as client, ThreadPoolExecutor(16) as pool:
        started_at = time.monotonic()
        list(pool.map(lambda _: client.generate("The river", params), range(32)))
        return 32 / (time.monotonic() - started_at)


def wait_until_idle(service):
    for _ in range(100):
        last = report(service)
        if last.num_running == last.num_waiting == 0:
            return last
        time.sleep(0.2)
    pytest.fail("requests were left over")
