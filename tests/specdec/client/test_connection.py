"""Calls that fail, and how a client connects: codes, retries, deadlines, addresses and TLS."""

import logging
import math
import ssl
import threading
from contextlib import nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from specdec.client import (
    AdminClient,
    AsyncClient,
    Client,
    ClientError,
    SpeculationChange,
    connection,
)
from specdec.client.attempts import RETRY_DELAYS_S, Attempts
from specdec.types.errors import AbortedError, InvalidValueError
from tests.specdec.client.certificate import piped, self_signed_certificate
from tests.specdec.client.fake_service import FakeService, running


def test_an_error_about_an_invalid_api_key_does_not_contain_it():
    with pytest.raises(InvalidValueError, match="not shown") as caught:
        Client("127.0.0.1:9000", api_key="sk-secret\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "num_errors", "num_calls"),
    [
        ("UNAVAILABLE", 2, 3),
        ("UNAVAILABLE", 100, 1 + len(RETRY_DELAYS_S)),
        ("RESOURCE_EXHAUSTED", 100, 1),
        ("INTERNAL", 100, 1),
        ("DEADLINE_EXCEEDED", 100, 1),
    ],
)
def test_a_call_is_retried_only_when_the_service_is_unavailable(
    client, service, code, num_errors, num_calls
):
    service.error, service.num_errors = (grpc.StatusCode[code], "no"), num_errors
    with suppress(ClientError):
        assert client.generate("Why?").text == "Blue sky"
    assert len(service.requests) == num_calls


def test_an_address_needs_a_port():
    with pytest.raises(InvalidValueError, match="host:port"):
        Client("localhost")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "HTTPS://host", "grpc://host:9000"])
def test_an_address_is_no_url(address):
    message = f"address is '{address}'; it must be host:port of the gRPC API, such as "
    with pytest.raises(InvalidValueError, match=message) as caught:
        Client(address)
    assert "without a scheme" in str(caught.value)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
async def test_an_infinite_timeout_is_no_limit(service, timeout_s):
    with Client(service.address, timeout_s=timeout_s) as client:
        assert client.generate("Why?").text == "Blue sky"
        assert len(list(client.generate_stream("Why?"))) == 2
    async with AsyncClient(service.address, timeout_s=timeout_s) as other:
        assert (await other.generate("Why?")).text == "Blue sky"


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan])
def test_a_timeout_is_above_0(timeout_s):
    with pytest.raises(InvalidValueError, match=r"timeout_s is .*; it must be a number"):
        Client("127.0.0.1:9000", timeout_s=timeout_s)


def test_a_rejection_carries_code_and_message(client, service):
    service.error = (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2.0; it must be at most 1")
    with pytest.raises(ClientError) as caught:
        list(client.generate_stream("Why?"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == str(caught.value) == "top_p is 2.0; it must be at most 1"


def test_a_broken_stream_yields_the_received_chunks_and_then_raises(client, service):
    service.error = (grpc.StatusCode.UNAVAILABLE, "the model is lost")
    service.num_chunks_before_error = 1
    stream = client.generate_stream("Why?", resume=False)
    assert next(stream).text == "Blue"
    with pytest.raises(ClientError) as caught:
        next(stream)
    expected = f"the service at {service.address} is unavailable: the model is lost"
    assert caught.value.message == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:9000"])
def test_an_unreachable_address_raises_unavailable(address):
    with Client(address, timeout_s=10) as client, pytest.raises(ClientError) as caught:
        client.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.message == (
        f"no service answers at {address}; start one with `specdec serve`"
    )


def test_an_expired_deadline_raises_and_cancels_the_call(service):
    service.hangs = True
    with Client(service.address, timeout_s=0.2) as client:
        while not service.requests:  # a thread of the service may be late
            with pytest.raises(ClientError) as caught:
                list(client.generate_stream("Why?"))
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.message.endswith("did not complete its response within 0.2 s")
    assert service.ended.wait(30), "the service did not observe the cancellation"


def test_an_unimplemented_method_reports_another_service_or_version(client, service):
    service.error = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    with pytest.raises(ClientError, match="is not a specdec service, or runs another version"):
        client.generate("Why?")


def test_tls(tmp_path):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate()
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with running(FakeService(), credentials) as service:
        for path in (ca_file, str(ca_file)):
            with Client(service.address, tls_ca_file=path) as client:
                assert client.model_info().model == "tiny"
        with Client(service.address) as client:
            expected = f"{service.address} closed the connection; if it uses TLS, set tls_ca_file"
            assert failure_of(client) == expected


@pytest.mark.parametrize("make", [Client, AdminClient])
def test_tls_with_a_certificate_of_another_name(tmp_path, make):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate("llm.example.com")
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with running(FakeService(), credentials) as service:
        with make(service.address, tls_ca_file=ca_file) as client:
            failure = failure_of(client)
        assert "for another name; call it by that name, or set tls_server_name" in failure
        named = {"tls_ca_file": ca_file, "tls_server_name": "llm.example.com"}
        with make(service.address, **named) as client:
            assert "name" not in failure_of(client)


def failure_of(client):
    """Return the error of the first call, if any; the fake service has no AdminService."""
    try:
        client.model_info() if isinstance(client, Client) else client.status()
    except ClientError as failed:
        return failed.message
    return ""


def test_tls_to_a_service_without_tls(service, tmp_path):
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(self_signed_certificate()[1])
    client = Client(service.address, tls_ca_file=ca_file)
    with client, pytest.raises(ClientError) as caught:
        client.model_info()
    assert caught.value.message == (
        f"the TLS handshake with {service.address} failed; check the address and the CA file"
    )


@pytest.mark.parametrize("is_pipe", [False, True])
def test_tls_to_an_https_port(tmp_path, is_pipe):
    key, certificate = self_signed_certificate()
    for name, content in (("key", key), ("ca", certificate)):
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca", tmp_path / "key")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            piped(certificate) if is_pipe else nullcontext(tmp_path / "ca") as path,
            Client(f"127.0.0.1:{server.server_port}", tls_ca_file=path) as client,
        ):
            assert "is an HTTP port" in failure_of(client)
        server.shutdown()


@pytest.mark.parametrize("content", [None, "", "-----BEGIN PRIVATE KEY-----", "é"])
def test_a_ca_file_without_certificates_is_named(tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidValueError, match=r"tls_ca_file is .* must be a readable file of c"):
        Client("127.0.0.1:9000", tls_ca_file=path)


RESET = SpeculationChange(reset=True)
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.fixture
def unreachable_proxy(monkeypatch):
    """Name a proxy that does not answer in all variables, as grpc and HTTP clients read them."""
    for name in PROXY_VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unreachable_proxy")
async def test_loopback_never_goes_through_a_proxy(service):
    with Client(service.address) as client:
        assert client.model_info().model == "tiny"
    async with AsyncClient(service.address) as client:
        assert (await client.model_info()).model == "tiny"
    with AdminClient(service.address) as client:
        # The fake service has no AdminService; it answered.
        assert failure_of(client).endswith(
            "is not a specdec service, or runs another version of specdec"
        )


def test_a_call_on_a_closed_client_is_an_error(client, service):
    service.hangs, service.num_chunks_before_error = True, 1
    chunks = client.generate_stream("Why?")
    next(chunks)
    client.close()
    for call in (lambda: next(chunks), client.model_info):
        with pytest.raises(ClientError, match="the client was closed") as caught:
            call()
        assert caught.value.code is grpc.StatusCode.CANCELLED


def closing_first(client, name, monkeypatch):
    """Close the client as a call of this method begins, as another thread may."""
    method = getattr(client._stub, name)

    def call(*args, is_future=False, **kwargs):
        client._is_closed = True
        client._channel.close()
        return (method.future if is_future else method)(*args, **kwargs)

    call.future = partial(call, is_future=True)
    monkeypatch.setattr(client._stub, name, call)


def test_a_client_that_is_closed_as_a_call_begins_is_reported_as_closed(service, monkeypatch):
    for name, begin in (
        ("GetModelInfo", lambda client: client.model_info()),
        ("GenerateStream", lambda client: next(client.generate_stream("Why?"))),
    ):
        client = Client(service.address)
        closing_first(client, name, monkeypatch)
        with pytest.raises(ClientError, match="the client was closed") as caught:
            begin(client)
        assert isinstance(caught.value.__cause__, ValueError)


async def test_an_async_client_that_is_closed_as_a_call_begins_is_reported_as_closed(
    service, monkeypatch
):
    client = AsyncClient(service.address)
    method = client._stub.GetModelInfo

    async def call(*args, **kwargs):
        await client.close()
        return await method(*args, **kwargs)

    monkeypatch.setattr(client._stub, "GetModelInfo", call)
    with pytest.raises(ClientError, match="the client was closed"):
        await client.model_info()


def test_a_request_that_was_aborted_is_not_sent_again(client, service):
    service.error = (grpc.StatusCode.CANCELLED, str(AbortedError("r1")))
    with pytest.raises(ClientError, match="the request was aborted by its id") as caught:
        list(client.generate_stream("Why?"))
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert len(service.requests) == 1


def test_a_call_that_the_service_cancels_finds_it_unavailable(client, service):
    service.error, service.num_errors = (grpc.StatusCode.CANCELLED, ""), 1
    assert client.generate("Why?").text == "Blue sky"
    assert len(service.requests) == 2


def test_attempts_are_logged(client, service, caplog):
    caplog.set_level(logging.INFO, "specdec.client")
    service.error, service.num_errors = (grpc.StatusCode.UNAVAILABLE, "no"), 1
    client.generate("Why?")
    [record] = caplog.records
    expected = f"the service at {service.address} is unavailable: no; trying again in 0.0 s"
    assert record.getMessage() == expected


def test_an_error_after_a_deadline_names_the_failure_before():
    attempts = Attempts(10.0, (0.1,))
    attempts.delay_s(ClientError(grpc.StatusCode.UNAVAILABLE, "no service"))
    with pytest.raises(ClientError) as caught:
        attempts.delay_s(ClientError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.message == "late; the last attempt before failed: no service"


def test_a_pause_that_would_outlast_the_deadline_is_not_made(service, monkeypatch):
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", (60.0,))
    service.error = (grpc.StatusCode.UNAVAILABLE, "no")
    with Client(service.address, timeout_s=30) as client, pytest.raises(ClientError, match=r"no$"):
        client.generate("Why?")
    assert len(service.requests) == 1


@pytest.mark.parametrize(("name", "num_calls"), [("status", 4), ("set_speculation", 1)])
def test_only_calls_of_operators_that_read_are_retried(name, num_calls, caplog):
    caplog.set_level(logging.INFO, "specdec.client")
    with AdminClient("127.0.0.1:1", timeout_s=10) as client, pytest.raises(ClientError):
        client.status() if name == "status" else client.set_speculation(RESET)
    assert len(caplog.records) == num_calls - 1
