"""The front doors of the running service: what strangers can reach, take and hold."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import grpc
import httpx
import pytest

from cluster.api.grpc.status import WRITE_TIMEOUT_S
from cluster.api.http.connection import MAX_LINGERING_BYTES
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import AdminClient, Client, ClientError, SpeculationChange
from tests.cluster.http_server import connected
from tests.e2e.conftest import running_service
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

MIB = b" " * 2**20
CHUNK = b"100000\r\n" + MIB + b"\r\n"
KEY = "sk-battery-staple"
REBOUND = {"host": "rebound.example:8000", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/admin/speculation", {"mode": "off"}),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/dashboard/generate", {"prompt": "a", "max_tokens": 1}),
        ("GET", "/metrics", None),
    ],
)
def test_a_page_with_a_rebound_name_reaches_nothing(service, method, path, body):
    with httpx.Client(base_url=service.http_url, timeout=30) as http:
        before = http.get("/v1/admin/speculation").json()["version"]
        assert http.request(method, path, json=body, headers=REBOUND).status_code == 421
        assert http.get("/v1/admin/speculation").json()["version"] == before


@pytest.fixture(scope="module")
def with_key(tiny_model_dir, tmp_path_factory):
    """A service with an API key and no admin token."""
    log = tmp_path_factory.mktemp("with_key") / "log"
    with running_service(tiny_model_dir, log, "--api-key", KEY, "--log-level", "debug") as service:
        yield service


def test_with_an_api_key_nothing_generates_or_changes_without_it(with_key):
    asked = {"prompt": "a", "max_tokens": 1}
    calls = [
        ("POST", "/v1/completions", asked),
        ("POST", "/dashboard/generate", asked),
        ("GET", "/dashboard/events", None),
        ("PUT", "/v1/admin/speculation", {"mode": "off"}),
        ("POST", "/v1/admin/profile", {}),
        ("GET", "/v1/admin/status", None),
    ]
    with httpx.Client(base_url=with_key.http_url, timeout=30) as http:
        for method, path, body in calls:
            assert http.request(method, path, json=body).status_code == 401, path
        http.headers["authorization"] = f"Bearer {KEY}"
        assert http.post("/dashboard/generate", json=asked).status_code == 200
        assert http.put("/v1/admin/speculation", json={"mode": "off"}).status_code == 200
    with AdminClient(with_key.grpc_address) as admin, pytest.raises(ClientError) as caught:
        admin.set_speculation(SpeculationChange(mode="on"))
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    with AdminClient(with_key.grpc_address, token=KEY) as admin:
        assert admin.set_speculation(SpeculationChange(mode="on")).in_force.mode == "on"
    assert "access: generation, dashboard and changes need an API key" in with_key.log.read_text()


def test_ranks_have_no_key_in_their_environment(with_key):
    """And no process but the command's has Ray's token there."""
    environments = {each: each.environ() for each in with_key.descendants() if is_of_ray(each)}
    ranks = [values for each, values in environments.items() if "Worker" in each.name()]
    assert ranks
    assert not [values for values in ranks if KEY in " ".join(values.values())]
    for values in environments.values():
        assert "RAY_AUTH_TOKEN" not in values
        assert values["RAY_AUTH_MODE"] == "token"


def is_of_ray(process):
    return "RAY_AUTH_MODE" in process.environ()


def test_metrics_and_probes_are_open_and_show_no_key(with_key):
    prompt = "Wombats dig at noon"
    with httpx.Client(base_url=with_key.http_url, timeout=30) as http:
        body = {"prompt": prompt, "max_tokens": 2}
        bearer = {"authorization": f"Bearer {KEY}"}
        assert http.post("/v1/completions", json=body, headers=bearer).status_code == 200
        for path in ("/metrics", "/health", "/ready"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert KEY not in answer.text
            assert prompt not in answer.text


def test_the_log_has_neither_keys_nor_prompts_nor_answers(with_key):
    prompt, wrong = "Wombats dig at dusk", "sk-wrong-wombat"
    asked = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True}
    with httpx.Client(base_url=with_key.http_url, timeout=30) as http:
        for key, body, status in (
            (KEY, asked, 200),
            (wrong, asked, 401),
            (KEY, {**asked, "temperature": -1}, 400),
            (KEY, {**asked, "prompt": prompt * 1000}, 400),
        ):
            bearer = {"authorization": f"Bearer {key}"}
            answer = http.post("/v1/completions", json=body, headers=bearer)
            assert answer.status_code == status
            if status == 200:
                text = answer.json()["choices"][0]["text"].strip()
    with Client(with_key.grpc_address, api_key=KEY) as client:
        client.generate(prompt)
    log = log_with(with_key, "request ended", count=2)
    assert not [each for each in (prompt, text, KEY, wrong) if each in log]


def log_with(service, line, count):
    """Return the log once it has these lines, which Ray forwards within seconds."""
    deadline = time.monotonic() + 60
    while (log := service.log.read_text()).count(line) < count:
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
    return log


def ports_of_ray(service):
    """Return the addresses on which the processes of a service's Ray listen, ranks included."""
    own = {int(url.rpartition(":")[2]) for url in (service.grpc_address, service.http_url)}
    return {
        connection.laddr
        for process in service.descendants()
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN" and connection.laddr.port not in own
    }


RAY_METHODS = (  # of the server that places actors, of a node, and of a worker
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.CoreWorkerService/PushTask",
)


@pytest.mark.parametrize("method", RAY_METHODS)
@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_private_ray_refuses_calls_without_its_token(embedded, method, token):
    ports = {port for _, port in ports_of_ray(embedded)}
    answers = {port: answer_of_ray(port, method, token) for port in ports}
    assert "UNAUTHENTICATED" in answers.values(), answers
    assert set(answers.values()) <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, answers


def answer_of_ray(port, method, token):
    """Call a method of Ray with an empty message, and return the status code."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"


@pytest.mark.parametrize(
    ("start", "part", "status"),
    [
        (b"POST /dashboard/generate HTTP/1.1\r\ncontent-length: 419430400\r\n\r\n", MIB, 413),
        (b"POST /dashboard/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", CHUNK, 413),
        (b"GET /ready HTTP/1.1\r\na: ", MIB, 431),
    ],
)
async def test_bodies_and_headers_of_400_mib_are_not_read(service, start, part, status):
    port = int(service.http_url.rpartition(":")[2])
    async with connected(port) as client:
        head, _, rest = start.partition(b"\r\n")
        headers = b"\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await client.send(head + headers + rest)
        await client.send(part, count=400)
        answer = await client.answer()
    assert client.num_sent < MAX_LINGERING_BYTES + 48 * 2**20
    assert answer == b"" or int(answer.split(b" ")[1]) == status  # the reset may overtake it
    assert httpx.get(f"{service.http_url}/ready", timeout=30).status_code == 200


def test_a_message_above_the_limit_does_not_reach_the_service(service):
    with Client(service.grpc_address) as client, pytest.raises(ClientError) as caught:
        client.generate("x" * 17 * 2**20)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_hundred_large_messages_take_the_memory_of_few(embedded):
    def memory():
        return sum(each.memory_info().rss for each in embedded.descendants())

    before = memory()
    command = [sys.executable, "-m", "tests.cluster.large_messages", embedded.grpc_address]
    client = subprocess.Popen([*command, "100", str(15 * 2**20)], stdout=subprocess.PIPE, text=True)
    peak = before
    while client.poll() is None:
        peak = max(peak, memory())
        time.sleep(0.02)
    counts = dict(line.split() for line in client.stdout.read().splitlines())
    assert set(counts) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, "a prompt is too long"
    assert peak - before < 700 * 2**20


@pytest.fixture(scope="module")
def unread_streams(embedded, on_serve):
    """A stream of each ingress that is not read, and the time when all was generated.

    Their clients have a small window, and chunks with many log-probabilities fill it.
    """
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    sampling = pb.SamplingParams(n=8, max_tokens=480, ignore_eos=True, logprobs=20)
    request = pb.GenerateRequest(text="a", sampling=sampling)
    with ExitStack() as stack:
        streams = []
        for each in (embedded, on_serve):
            channel = stack.enter_context(grpc.insecure_channel(each.grpc_address, options))
            streams.append(InferenceServiceStub(channel).GenerateStream(request))
            assert next(streams[-1]).request_id
        for each in (embedded, on_serve):
            wait_until(lambda service=each: not num_running(service))
        yield streams, time.monotonic()


def num_running(service):
    status = httpx.get(f"{service.http_url}/v1/admin/status", timeout=30).json()
    return sum(each["report"]["num_running"] for each in status["replicas"])


def test_idle_connections_take_no_place_of_probes(embedded, on_serve, unread_streams):
    """Those to both ingresses wait at the same time, and so do the unread streams."""
    services, last = (embedded, on_serve), []
    with ExitStack() as stack:
        for service in services:
            address = ("127.0.0.1", int(service.http_url.rpartition(":")[2]))
            for index in range(1100):
                idle = stack.enter_context(socket.create_connection(address, timeout=10))
                if index % 2:
                    idle.send(b"GET / HT")
            last.append(idle)
            for path in ("/health", "/ready", "/metrics"):
                assert httpx.get(service.http_url + path, timeout=30).status_code == 200
        for idle in last:
            idle.settimeout(20)
            assert idle.recv(1) == b"", "half a request ends after 10 s"


def test_a_stream_that_is_not_read_ends_with_a_status(unread_streams):
    streams, generated_at_s = unread_streams
    time.sleep(max(0.0, generated_at_s + WRITE_TIMEOUT_S + 5 - time.monotonic()))
    for stream in streams:
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the client has not read its stream for 20 s"
