"""Requests over the OpenAI API, and parsing of its events: ours, vLLM's and invalid ones."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.cli.bench.backend import RequestFailedError, StreamEvent, TokenUsage
from cluster.cli.bench.dataset import SampleRequest
from cluster.cli.bench.openai_backend import OpenAIBackend, ServiceError
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

GREEDY = SamplingParams(temperature=0.0, seed=0)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
SPECULATION = {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "verifier": "a"}


class Service:
    """Answers every request with `events` or `status`, and records the requests."""

    def __init__(self):
        self.requests = []
        self.events = []
        self.status = 200
        self.models = {"data": [{"id": "tiny"}]}

    def handle(self, request):
        self.requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=self.models)
        lines = [each if isinstance(each, str) else json.dumps(each) for each in self.events]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return httpx.Response(self.status, text=text)

    @property
    def body(self):
        return json.loads(self.requests[-1].content)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def connect(service):
    def connect(endpoint="chat", options=None, **flags):
        transport = httpx.MockTransport(service.handle)
        url, options = "http://127.0.0.1:1", options or GREEDY
        return OpenAIBackend(url, endpoint, options, timeout_s=5, transport=transport, **flags)

    return connect


def test_a_chat_request(connect, service):
    list(connect().stream(SampleRequest("Why?", 9, "salt")))
    assert service.requests[-1].url.path == "/v1/chat/completions"
    assert service.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "salt",
    }


def test_a_completion_request_with_all_options(connect, service):
    speculation = SpeculationOptions(enabled=False, num_speculative_tokens=0)
    options = SamplingParams(temperature=0.5, seed=3, ignore_eos=True, speculation=speculation)
    backend = connect("completions", options, model="mine", api_key="secret")
    list(backend.stream(SampleRequest("Why?", 9)))
    assert service.requests[-1].url.path == "/v1/completions"
    assert service.requests[-1].headers["authorization"] == "Bearer secret"
    assert len(service.requests) == 1, "a given model name is not looked up"
    assert service.body["prompt"] == "Why?"
    assert service.body["ignore_eos"] is True
    assert service.body["speculation"] == {"enabled": False, "num_speculative_tokens": 0}
    assert "cache_salt" not in service.body
    assert service.body["model"] == "mine"


def test_events_of_our_chats(connect, service):
    details = {"speculation": SPECULATION}
    service.events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None},
        {"choices": [{"delta": {"content": "Blue"}}], "usage": None},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None},
        {"choices": [], "usage": USAGE | {"completion_tokens_details": details}},
    ]
    usage = TokenUsage(7, 3, SpeculationStats(2, 6, 3))
    assert list(connect().stream(SampleRequest("Why?", 9))) == [
        StreamEvent(False),
        StreamEvent(True),
        StreamEvent(False),
        StreamEvent(False, usage),
    ]


def test_events_of_completions_of_other_services(connect, service):
    service.events = [{"choices": [{"text": "Blue"}]}, {"choices": [], "usage": USAGE}]
    events = list(connect("completions").stream(SampleRequest("Why?", 9)))
    assert events == [StreamEvent(True), StreamEvent(False, TokenUsage(7, 3))]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_count_as_tokens(connect, service, name):
    service.events = [{"choices": [{"delta": {name: [1]}}]}]
    assert list(connect().stream(SampleRequest("Why?", 9))) == [StreamEvent(True)]


@pytest.mark.parametrize(
    ("status", "events", "kind"),
    [
        (429, [], "HTTP 429"),
        (200, [{"error": {"code": "unavailable"}}], "error in the stream: unavailable"),
        (200, [{"error": "gone"}], "error in the stream: unnamed"),
        (200, ["{"], "an event that is not of the OpenAI API"),
        (200, ["[1]"], "an event that is not of the OpenAI API"),
        (200, [{"choices": [], "usage": {}}], "an event that is not of the OpenAI API"),
    ],
)
def test_failures_by_kind(connect, service, status, events, kind):
    service.status, service.events = status, events
    with pytest.raises(RequestFailedError) as caught:
        list(connect().stream(SampleRequest("Why?", 9)))
    assert caught.value.kind == kind


def test_a_stream_that_ends_early():
    events = 'data: {"choices": [{"text": "a"}]}\n\n'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=events))
    backend = OpenAIBackend(
        "http://127.0.0.1:1", "chat", GREEDY, timeout_s=5, model="tiny", transport=transport
    )
    with pytest.raises(RequestFailedError, match=r"the stream ended before \[DONE\]"):
        list(backend.stream(SampleRequest("Why?", 9)))


def test_an_unreachable_service():
    with pytest.raises(ServiceError, match="1:1/v1/models failed: "):
        OpenAIBackend("http://127.0.0.1:1", "chat", GREEDY, timeout_s=5)
    backend = OpenAIBackend("http://127.0.0.1:1", "chat", GREEDY, timeout_s=5, model="tiny")
    with pytest.raises(RequestFailedError, match="ConnectError"):
        list(backend.stream(SampleRequest("Why?", 9)))
    backend.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"])
def test_a_url_may_end_in_v1(service, url):
    transport = httpx.MockTransport(service.handle)
    OpenAIBackend(url, "chat", GREEDY, timeout_s=5, transport=transport)
    assert str(service.requests[0].url) == "http://127.0.0.1:1/v1/models"


def test_a_service_of_another_kind(connect, service):
    service.models = {"models": []}
    with pytest.raises(ServiceError, match="lists no model in the format of the OpenAI API"):
        connect()


@pytest.mark.parametrize("key", ["secret\n", "s\u00e9cret", "sec ret", "secret\x7f"])
def test_an_invalid_key_is_rejected_and_not_shown(connect, service, key):
    with pytest.raises(InvalidValueError, match=r"^api_key is 'not shown'; it must be printable"):
        connect(api_key=key)
    assert not service.requests


def test_an_invalid_certificate_file(connect, tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(
        InvalidValueError, match=r"tls_ca_file is .* it must be a readable file of cert"
    ):
        connect(tls_ca_file=path)


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://"])
def test_an_invalid_url(url):
    with pytest.raises((InvalidValueError, ServiceError)):
        OpenAIBackend(url, "chat", GREEDY, timeout_s=5)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD + b'data: {"choices": [{"text": "a"}]}\n\n'])
def test_close_ends_open_streams(sent):
    """Close the backend while the service sends nothing, or nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        backend = OpenAIBackend(url, "completions", GREEDY, timeout_s=60, model="tiny")
        stream = pool.submit(lambda: list(backend.stream(SampleRequest("Why?", 9))))
        connection, _ = server.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(sent)
            time.sleep(0.1)  # until the reader waits for more
            backend.close()
            with pytest.raises(RequestFailedError):
                stream.result(timeout=10)
