"""What is sent over the OpenAI API, and how its events are read: ours, vLLM's and broken ones."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.cli.bench.backend import Heard, RequestFailedError, TokenUsage
from cluster.cli.bench.openai_backend import OpenAIBackend, ServiceError
from cluster.cli.bench.questions import HowToAsk, Question
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import SpeculationOptions
from specdec.types.stats import SpeculationStats

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
SPECULATION = {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "verifier": "a"}


class Service:
    """Answers every request with `events`, or with `status`; keeps what it was asked."""

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
    def connect(endpoint="chat", how=None, **options):
        transport = httpx.MockTransport(service.handle)
        url, how = "http://127.0.0.1:1", how or HowToAsk()
        return OpenAIBackend(url, endpoint, how, timeout_s=5, transport=transport, **options)

    return connect


def test_a_chat_request(connect, service):
    list(connect().ask(Question("Why?", 9, "salt")))
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


def test_a_completion_request_with_all_there_is(connect, service):
    speculation = SpeculationOptions(enabled=False, num_speculative_tokens=0)
    how = HowToAsk(0.5, 3, True, speculation)
    list(connect("completions", how, model="mine", api_key="secret").ask(Question("Why?", 9)))
    assert service.requests[-1].url.path == "/v1/completions"
    assert service.requests[-1].headers["authorization"] == "Bearer secret"
    assert len(service.requests) == 1, "a model that is given is not asked for"
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
    assert list(connect().ask(Question("Why?", 9))) == [
        Heard(False),
        Heard(True),
        Heard(False),
        Heard(False, usage),
    ]


def test_events_of_completions_elsewhere(connect, service):
    service.events = [{"choices": [{"text": "Blue"}]}, {"choices": [], "usage": USAGE}]
    heard = list(connect("completions").ask(Question("Why?", 9)))
    assert heard == [Heard(True), Heard(False, TokenUsage(7, 3))]


@pytest.mark.parametrize("name", ["reasoning_content", "tool_calls"])
def test_what_else_a_model_says_counts_too(connect, service, name):
    service.events = [{"choices": [{"delta": {name: [1]}}]}]
    assert list(connect().ask(Question("Why?", 9))) == [Heard(True)]


@pytest.mark.parametrize(
    ("status", "events", "kind"),
    [
        (429, [], "HTTP 429"),
        (200, [{"error": {"code": "unavailable"}}], "error in the stream: unavailable"),
        (200, [{"error": "gone"}], "error in the stream: unnamed"),
        (200, ["{"], "an event that is none of OpenAI's API"),
        (200, ["[1]"], "an event that is none of OpenAI's API"),
        (200, [{"choices": [], "usage": {}}], "an event that is none of OpenAI's API"),
    ],
)
def test_failures_by_kind(connect, service, status, events, kind):
    service.status, service.events = status, events
    with pytest.raises(RequestFailedError) as caught:
        list(connect().ask(Question("Why?", 9)))
    assert caught.value.kind == kind


def test_nobody_there():
    with pytest.raises(ServiceError, match="1:1 tells of no model"):
        OpenAIBackend("http://127.0.0.1:1", "chat", HowToAsk(), timeout_s=5)
    backend = OpenAIBackend("http://127.0.0.1:1", "chat", HowToAsk(), timeout_s=5, model="tiny")
    with pytest.raises(RequestFailedError, match="ConnectError"):
        list(backend.ask(Question("Why?", 9)))
    backend.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"])
def test_a_url_may_end_as_openais_clients_have_it(service, url):
    transport = httpx.MockTransport(service.handle)
    OpenAIBackend(url, "chat", HowToAsk(), timeout_s=5, transport=transport)
    assert str(service.requests[0].url) == "http://127.0.0.1:1/v1/models"


def test_a_service_of_another_kind(connect, service):
    service.models = {"models": []}
    with pytest.raises(ServiceError, match="lists no model as OpenAI's API does"):
        connect()


@pytest.mark.parametrize("key", ["secret\n", "s\u00e9cret", "sec ret", "secret\x7f"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(connect, service, key):
    with pytest.raises(InvalidValueError, match=r"^api_key is 'not shown'; it must be printable"):
        connect(api_key=key)
    assert not service.requests


def test_certificates_that_are_none(connect, tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(InvalidValueError, match=r"tls_ca_file is .* it must be a file of cert"):
        connect(tls_ca_file=path)


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://"])
def test_a_url_that_is_none(url):
    with pytest.raises((InvalidValueError, ServiceError)):
        OpenAIBackend(url, "chat", HowToAsk(), timeout_s=5)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize("said", [b"", HEAD + b'data: {"choices": [{"text": "a"}]}\n\n'])
def test_closing_ends_what_is_still_being_answered(said):
    """By a service that says nothing at all, or no more."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        backend = OpenAIBackend(url, "completions", HowToAsk(), timeout_s=60, model="tiny")
        asking = pool.submit(lambda: list(backend.ask(Question("Why?", 9))))
        connection, _ = server.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(said)
            time.sleep(0.1)  # for the reader to wait for more
            backend.close()
            with pytest.raises(RequestFailedError):
                asking.result(timeout=10)
