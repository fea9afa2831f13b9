"""Fuzz tests of every gRPC method: each message is served or rejected, without lasting effects."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, product
from random import Random

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from cluster.api.grpc.rpc_access import SERVICE_NAMES
from cluster.api.grpc.status import MALFORMED_MESSAGE
from protos.specdec.v1 import admin_pb2, inference_pb2
from specdec.client import AdminClient, Client, SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.random_messages import MessageMaker

pytestmark = pytest.mark.e2e

NUM_EXAMPLES = int(os.environ.get("SPECDEC_TEST_EXAMPLES", "10000"))
NUM_AT_ONCE = 8
TIMEOUT_S = 20.0
WATCH_TIMEOUT_S = 2.0

ALLOWED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "UNIMPLEMENTED",
    "DEADLINE_EXCEEDED",
}
MALFORMED = (b"\xff", b"\x0a\xff", b"\xff\xff\xff not a message", b"\x0b" * 300)
"""A truncated tag, a string longer than its message, no tag, nested groups: always invalid."""

METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
)
ENDLESS = ("WatchStats",)
"""Methods that stream indefinitely."""

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_GROWTH_BYTES = 64 * 2**20
MAX_MORE_FILES = 20

SCHEDULE = [each for each in METHODS for _ in range(6 if "Generate" in each.name else 1)]
"""The order of methods; those with many fields are more frequent."""

PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@contextmanager
def raw_channel(service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc_address) as channel:
        yield channel


def path_of(method):
    return f"/{method.containing_service.full_name}/{method.name}"


def call(channel, method, request: bytes, metadata=(), timeout_s=TIMEOUT_S):
    """Call a method; return the name of the status code and its details."""
    is_watch = method.name == "WatchStats"
    try:
        if method.server_streaming:
            ask = channel.unary_stream(path_of(method))
            stream = ask(
                request, timeout=WATCH_TIMEOUT_S if is_watch else timeout_s, metadata=metadata
            )
            list(islice(stream, 2 if is_watch else None))
            stream.cancel()
        else:
            channel.unary_unary(path_of(method))(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def random_message(method, number):
    """Generate the message of a number. Outputs are short, since the engine is not tested here."""
    random = Random(f"{method.full_name} {number}")
    message = MessageMaker(random).message(method.input_type)
    if method.name.startswith("Generate"):
        if message.WhichOneof("prompt") is None and random.random() < 0.9:
            message.text = "Ask the baker"
        if message.sampling.max_tokens > 4 or not message.sampling.HasField("max_tokens"):
            message.sampling.max_tokens = random.randint(1, 4)
    elif method.name == "Profile" and not 0 < message.timeout_s < 0.3:
        message.timeout_s = random.choice((0.1, 0.2, float("nan"), -1.0, 1e9))
    return message


def metadata_of(random):
    values = ("", "Bearer", "Bearer x", "00-" + "f" * 32 + "-" + "0" * 16 + "-01", "?" * 4_000)
    names = ("authorization", "traceparent", "tracestate", "x-request-id", "application-x")
    return [(random.choice(names), random.choice(values)) for _ in range(random.choice((0, 0, 3)))]


def check_one(channel, number):
    method = SCHEDULE[number % len(SCHEDULE)]
    message = random_message(method, number)
    metadata = metadata_of(Random(number))
    code, details = call(channel, method, message.SerializeToString(), metadata)
    assert code in ALLOWED, (number, code, details, str(message)[:2000])
    assert "Traceback" not in details, (number, details)
    assert "/site-packages/" not in details, (number, details)
    return method.name, code


@contextmanager
def concurrently(service):
    """Yield a function that calls another one concurrently for all items, and counts results."""
    with raw_channel(service) as channel, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield lambda function, items: Counter(pool.map(partial(function, channel), items))


def check_many(service, numbers) -> Counter[tuple[str, str]]:
    with concurrently(service) as run:
        return run(check_one, numbers)


def tokens_of(service):
    with Client(service.grpc_address, timeout_s=60) as client:
        return client.generate("Ask the baker", PLAIN).token_ids


@contextmanager
def unchanged_service(service) -> Iterator[None]:
    """Assert that the service is idle and unchanged after the block, speculation included."""
    before = tokens_of(service)
    yield
    with AdminClient(service.grpc_address) as admin:
        admin.set_speculation(SpeculationChange(reset=True, updated_by="the test's end"))
        deadline = time.monotonic() + 20
        while not is_idle(admin):
            assert time.monotonic() < deadline, admin.status()
            time.sleep(0.1)
    assert tokens_of(service) == before


def is_idle(admin):
    [replica] = admin.status().replicas
    report = replica.report
    return (report.num_running, report.num_waiting, report.kv_cache_usage) == (0, 0, 0.0)


def resource_usage(service):
    """Return the memory in bytes and the number of open files of all processes."""
    processes = [service.process, *service.descendants()]
    return (
        sum(each.memory_info().rss for each in processes),
        sum(each.num_fds() for each in processes),
    )


def test_random_messages_cover_every_field():
    """Fields of nested messages are counted by their path."""
    for method in METHODS:
        seen = set()
        for number in range(400):
            note_fields(random_message(method, number), "", seen)
        assert paths_of(method.input_type, "") <= seen, method.full_name


def note_fields(message, path, seen):
    for field, value in message.ListFields():
        seen.add(f"{path}{field.name}")
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                note_fields(each, f"{path}{field.name}.", seen)


def paths_of(descriptor, path):
    found = set()
    for field in descriptor.fields:
        found.add(f"{path}{field.name}")
        if field.message_type and not field.message_type.GetOptions().map_entry:
            found |= paths_of(field.message_type, f"{path}{field.name}.")
    return found


def test_every_service_is_covered():
    assert {each.containing_service.full_name for each in METHODS} == set(SERVICE_NAMES)


def test_random_messages_are_served_or_rejected(service):
    with unchanged_service(service):
        results = check_many(service, range(200))
    assert {name for name, _ in results} == {each.name for each in METHODS}
    assert {("GenerateStream", "OK"), ("GenerateStream", "INVALID_ARGUMENT")} <= set(results)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_random_messages_leak_no_resources(embedded):
    check_many(embedded, range(100_000, 101_500))  # fills caches and the pools of allocators
    held_bytes, num_files = resource_usage(embedded)
    with unchanged_service(embedded):
        results = check_many(embedded, range(NUM_EXAMPLES))
    held_after, num_files_after = resource_usage(embedded)
    print(
        f"{sum(results.values())} messages: {dict(Counter(code for _, code in results.elements()))}"
    )
    print(f"{(held_after - held_bytes) / 2**20:.1f} MiB and {num_files_after - num_files} files")
    assert held_after - held_bytes < MAX_GROWTH_BYTES
    assert num_files_after - num_files < MAX_MORE_FILES


def test_malformed_messages_are_rejected(service):
    with raw_channel(service) as channel, unchanged_service(service):
        for method, content in product(METHODS, MALFORMED):
            code, details = call(channel, method, content)
            assert (code, details) == ("INVALID_ARGUMENT", MALFORMED_MESSAGE), (
                method.full_name,
                content,
            )


def test_mutated_messages_are_served_or_rejected(service):
    with unchanged_service(service), concurrently(service) as run:
        results = run(check_mutated, range(150))
    assert {"OK", "INVALID_ARGUMENT"} <= set(results)


def check_mutated(channel, number):
    method, random = SCHEDULE[number % len(SCHEDULE)], Random(number)
    content = bytearray(random_message(method, number).SerializeToString()[:4096])
    for _ in range(random.randint(1, 4) if content else 0):
        content[random.randrange(len(content))] = random.randrange(256)
    code, details = call(channel, method, bytes(content), timeout_s=2)
    assert code in ALLOWED, (method.full_name, number, code, details)
    return code


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_message_that_is_too_large_is_rejected(embedded, method):
    with raw_channel(embedded) as channel:
        code, _ = call(channel, method, bytes(17 * 2**20))
    assert code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(("num_messages", "timeout_s"), [(0, 0.5), (2, 30.0)])
def test_a_call_without_exactly_one_message_ends(service, num_messages, timeout_s):
    """Of several messages, only the first one counts.

    Without a message a call is refused by the service's own server, and ends at its deadline with
    that of Ray Serve, whose handlers begin with the message.
    """

    def ask(channel, method):
        if num_messages == 0:
            expected = {"INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}
        elif method.name in ENDLESS:
            expected = {"DEADLINE_EXCEEDED"}
        else:
            expected = {call(channel, method, b"")[0]}
        open_call = channel.stream_stream(path_of(method))
        ends_after_s = 0.5 if method.name in ENDLESS else timeout_s
        try:
            list(open_call(iter([b""] * num_messages), timeout=ends_after_s))
        except grpc.RpcError as error:
            code = error.code().name
        else:
            code = "OK"
        assert code in expected, method.full_name
        return code

    with unchanged_service(service), concurrently(service) as run:
        results = run(ask, METHODS)
    if num_messages > 0:
        assert results["DEADLINE_EXCEEDED"] == len(ENDLESS)


def test_connections_without_grpc_do_not_affect_other_clients(service):
    host, _, port = service.grpc_address.rpartition(":")
    with unchanged_service(service):
        for number in range(40):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                random = Random(number)
                start = HTTP2_PREFACE if number % 2 else b""
                with suppress(OSError):  # the service may have closed it already
                    connection.sendall(start + random.randbytes(random.randrange(1, 4096)))
