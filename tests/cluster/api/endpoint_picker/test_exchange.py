"""The conversation with the proxy, message by message, in each mode of bodies."""

import json
from math import inf

import pytest
from google.protobuf.json_format import MessageToDict

from cluster.api.base.byte_budget import SMALL_BYTES, ByteBudget
from cluster.api.base.routing_hint import MAX_READ_BYTES
from cluster.api.endpoint_picker.choice import UNREAD, PickRequest
from cluster.api.endpoint_picker.exchange import DESTINATION, Exchange, read_request
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.reports import EndpointReport
from protos.ext_proc import external_processor_pb2 as pb


def exchange_of(pool):
    return Exchange(pool, ByteBudget(inf))


BODY = json.dumps({"model": "m", "prompt": "Once there was a river. " * 40}).encode()
ADDRESS = "10.0.0.1:8000"
OTHER = "10.0.0.2:8000"


@pytest.fixture
def pool():
    pool = Pool(lambda: 0.0)
    pool.set_addresses([ADDRESS])
    pool.get(ADDRESS).apply(EndpointReport(), is_ready=True, now_s=0.0)
    return pool


def headers(*, mode=None, end_of_stream=False, subset=None):
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=end_of_stream))
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = mode
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": subset}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def body(part, *, is_end=True):
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=part, end_of_stream=is_end))


def response(status="200", *, served=None, end_of_stream=False):
    head = pb.HttpHeaders(end_of_stream=end_of_stream)
    head.headers.headers.add(key=":status", raw_value=status.encode())
    message = pb.ProcessingRequest(response_headers=head)
    if served is not None:
        metadata = {"x-gateway-destination-endpoint-served": served}
        message.metadata_context.filter_metadata["envoy.lb"].update(metadata)
    return message


def response_body(part, *, is_end):
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=part, end_of_stream=is_end))


def kinds(answers):
    return [each.WhichOneof("response") for each in answers]


def destination(answer):
    """Return the endpoint of an answer, after checking that header and metadata name the same."""
    part = getattr(answer, answer.WhichOneof("response")).response
    [header] = part.header_mutation.set_headers
    assert header.header.key == DESTINATION
    assert header.append_action == header.OVERWRITE_IF_EXISTS_OR_ADD, "a client may send it too"
    address = header.header.raw_value.decode()
    assert MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {DESTINATION: address}}
    assert part.clear_route_cache
    return address


def streamed(answers):
    """Return the body in answers, after checking that only the last one ends it."""
    parts = [
        getattr(each, each.WhichOneof("response")).response.body_mutation.streamed_response
        for each in answers
    ]
    assert not any(each.end_of_stream for each in parts[:-1])
    assert all(len(each.body) <= 2**16 for each in parts)
    return b"".join(each.body for each in parts), parts[-1].end_of_stream


@pytest.mark.parametrize("mode", [None, pb.FULL_DUPLEX_STREAMED])
def test_full_duplex_holds_headers_back_until_the_body_is_complete(pool, mode):
    exchange = exchange_of(pool)
    assert exchange.answer(headers(mode=mode)) == []
    assert exchange.answer(body(BODY[:100], is_end=False)) == []
    first, *rest = exchange.answer(body(BODY[100:]))
    assert (kinds([first]), destination(first)) == (["request_headers"], ADDRESS)
    assert (set(kinds(rest)), streamed(rest)) == ({"request_body"}, (BODY, True))
    assert pool.get(ADDRESS).choices == {"load": 1}


def test_full_duplex_with_a_large_body_and_trailers(pool):
    large = b'{"prompt": "' + b"x" * MAX_READ_BYTES
    exchange = exchange_of(pool)
    exchange.answer(headers())
    assert exchange.answer(body(large[:MAX_READ_BYTES], is_end=False)) == []
    first, *rest = exchange.answer(body(large[MAX_READ_BYTES:], is_end=False))
    assert destination(first) == ADDRESS
    assert streamed(rest) == (large, False)
    more = exchange.answer(body(b"more", is_end=False))
    assert (kinds(more), streamed(more)) == (["request_body"], (b"more", False))
    end = exchange.answer(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert kinds(end) == ["request_trailers"]
    assert pool.get(ADDRESS).choices == {"unread": 1}


def test_full_duplex_chooses_at_trailers_that_end_a_body(pool):
    exchange = exchange_of(pool)
    exchange.answer(headers())
    exchange.answer(body(BODY, is_end=False))
    answers = exchange.answer(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert destination(answers[0]) == ADDRESS
    assert streamed(answers[1:2]) == (BODY, False)
    assert pool.get(ADDRESS).choices == {"load": 1}


def test_bodies_that_are_too_large_together_are_passed_on_unread(pool):
    budget = ByteBudget(3 * SMALL_BYTES)
    part = b'{"prompt": "' + b"x" * 2 * SMALL_BYTES
    exchanges = [Exchange(pool, budget) for _ in range(3)]
    for exchange in exchanges:
        exchange.answer(headers())
    assert exchanges[0].answer(body(part, is_end=False)) == []
    first, *rest = exchanges[1].answer(body(part, is_end=False))
    assert (destination(first), streamed(rest)) == (ADDRESS, (part, False))
    assert exchanges[0].answer(body(b'"}')) != []
    assert exchanges[2].answer(body(part, is_end=False)) == []
    exchanges[2].close()
    assert budget.num_bytes == 0
    assert pool.get(ADDRESS).choices == {"unread": 1, "load": 1}


def test_small_bodies_count_too(pool):
    """There may be thousands of slow clients."""
    budget = ByteBudget(100, uncounted_bytes=0)
    exchanges = [Exchange(pool, budget) for _ in range(2)]
    for exchange in exchanges:
        exchange.answer(headers())
    assert exchanges[0].answer(body(b"x" * 60, is_end=False)) == []
    assert exchanges[1].answer(body(b"x" * 60, is_end=False)) != []
    exchanges[0].close()
    assert budget.num_bytes == 0


def test_an_empty_last_part_ends_the_body(pool):
    exchange = exchange_of(pool)
    exchange.answer(headers())
    assert streamed(exchange.answer(body(b""))[1:]) == (b"", True)


def test_buffered_bodies_are_answered_once(pool):
    exchange = exchange_of(pool)
    [first] = exchange.answer(headers(mode=pb.BUFFERED))
    removed = pb.HeaderMutation(remove_headers=[DESTINATION])
    assert first.request_headers.response.header_mutation == removed, "a client does not choose"
    [answer] = exchange.answer(body(BODY))
    assert (kinds([answer]), destination(answer)) == (["request_body"], ADDRESS)
    assert not answer.request_body.response.HasField("body_mutation")
    assert pool.get(ADDRESS).choices == {"load": 1}


def test_trailers_without_a_body_choose_by_metadata(pool):
    """Envoy sends no empty body in this mode; the header is removed, and cannot be set again."""
    exchange = exchange_of(pool)
    exchange.answer(headers(mode=pb.BUFFERED))
    [answer] = exchange.answer(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    assert kinds([answer]) == ["request_trailers"]
    assert MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {DESTINATION: ADDRESS}}
    assert exchange.may_end


def test_a_second_choice_ends_the_first(pool):
    exchange = exchange_of(pool)
    for _ in range(2):
        exchange.answer(headers(end_of_stream=True))
    assert pool.get(ADDRESS).num_open == 1
    exchange.close()
    assert pool.get(ADDRESS).num_open == 0


def test_a_conversation_may_end_once_the_request_is_complete(pool):
    exchange = exchange_of(pool)
    for message, may_end in (
        (headers(), False),
        (body(BODY[:100], is_end=False), False),
        (body(BODY[100:]), True),
        (response(), True),
        (response_body(b"token", is_end=False), True),
    ):
        exchange.answer(message)
        assert exchange.may_end == may_end


def test_a_body_that_takes_too_long_is_released_unread(pool):
    exchange = exchange_of(pool)
    assert not exchange.is_waiting
    exchange.answer(headers())
    exchange.answer(body(BODY[:100], is_end=False))
    assert exchange.is_waiting
    first, *rest = exchange.release()
    assert (destination(first), streamed(rest)) == (ADDRESS, (BODY[:100], False))
    assert not exchange.is_waiting
    assert streamed(exchange.answer(body(BODY[100:]))) == (BODY[100:], True)
    assert pool.get(ADDRESS).choices == {"unread": 1}


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED_PARTIAL])
def test_without_the_whole_body_the_choice_is_made_at_the_headers(pool, mode):
    exchange = exchange_of(pool)
    [answer] = exchange.answer(headers(mode=mode))
    assert destination(answer) == ADDRESS
    [answer] = exchange.answer(body(BODY))
    assert answer == pb.ProcessingResponse(request_body=pb.BodyResponse())
    assert pool.get(ADDRESS).choices == {"unread": 1}


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.BUFFERED])
def test_a_request_without_a_body(pool, mode):
    [answer] = exchange_of(pool).answer(headers(mode=mode, end_of_stream=True))
    assert (kinds([answer]), destination(answer)) == (["request_headers"], ADDRESS)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": 5}', b'{"prompt": null}', b"[" * 10_000],
)
def test_malformed_bodies_are_passed_on_and_routed_by_load(pool, text):
    assert read_request(text) == PickRequest()
    exchange = exchange_of(pool)
    exchange.answer(headers())
    first, *rest = exchange.answer(body(text))
    assert (destination(first), streamed(rest)) == (ADDRESS, (text, True))


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"model": "m", "prompt": "x"}, "m"),
        ({"model": "a", "messages": [{"role": "user", "content": "x"}]}, "a"),
        ({"prompt": [1, 2, 3]}, ""),
    ],
)
def test_prompts_of_both_apis_are_read(fields, model):
    request = read_request(json.dumps(fields).encode())
    assert request.model == model
    assert request.hint is not UNREAD


@pytest.mark.parametrize(("n", "expected"), [(4, 4), (None, 1), (0, 1), (10**30, 128), ("4", 1)])
def test_the_number_of_choices_is_read_within_its_limits(n, expected):
    assert read_request(json.dumps({"prompt": "x", "n": n}).encode()).num_choices == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ["x", "y", "z"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [], "n": 3}, 3),
        ({"text": "x", "sampling_params": {"n": 5}}, 5),
        ({"text": ["x", "y"], "sampling_params": {"n": 5}}, 10),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {}]}, 3),
        ({"text": ["x"] * 1000, "sampling_params": [{"n": 1000}] * 1000}, 128 * 128),
        ({"text": "x", "sampling_params": [None, 5]}, 2),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}], "n": 2}, 2),
    ],
)
def test_each_choice_of_each_prompt_counts_as_a_stream(fields, expected):
    assert read_request(json.dumps(fields).encode()).num_choices == expected


def test_the_request_is_open_until_the_response_ends(pool):
    for end in (response_body(b"", is_end=True), pb.ProcessingRequest(response_trailers={})):
        exchange = exchange_of(pool)
        exchange.answer(headers())
        exchange.answer(body(BODY))
        assert pool.get(ADDRESS).num_open == 1
        assert kinds(exchange.answer(response())) == ["response_headers"]
        answers = exchange.answer(response_body(b"token", is_end=False))
        assert (kinds(answers), streamed(answers)) == (["response_body"], (b"token", False))
        assert pool.get(ADDRESS).num_open == 1
        assert len(exchange.answer(end)) == 1
        assert pool.get(ADDRESS).num_open == 0
        exchange.close()
        assert pool.get(ADDRESS).num_open == 0


def test_a_conversation_that_breaks_off_ends_the_request(pool):
    exchange = exchange_of(pool)
    exchange.answer(headers())
    exchange.answer(body(BODY))
    exchange.close()
    assert pool.get(ADDRESS).num_open == 0
    exchange = exchange_of(pool)
    exchange.answer(headers())
    exchange.close()


def test_a_response_in_parts_that_wait_for_answers(pool):
    exchange = exchange_of(pool)
    exchange.answer(headers(mode=pb.STREAMED))
    exchange.answer(response())
    [answer] = exchange.answer(response_body(b"token", is_end=False))
    assert answer == pb.ProcessingResponse(response_body=pb.BodyResponse())
    assert kinds(exchange.answer(response(end_of_stream=True))) == ["response_headers"]
    assert pool.get(ADDRESS).num_open == 0


def refusal(answers):
    [answer] = answers
    refused = answer.immediate_response
    assert json.loads(refused.body)["error"]["code"] in refused.details
    names = {each.header.key: each.header.raw_value for each in refused.headers.set_headers}
    assert names == {"content-type": b"application/json", "retry-after": b"1"}
    return refused.status.code


def test_without_a_ready_endpoint_the_proxy_answers_503(pool):
    pool.get(ADDRESS).fail_scrape(is_refused=True)
    exchange = exchange_of(pool)
    exchange.answer(headers())
    assert refusal(exchange.answer(body(BODY))) == 503
    assert exchange.answer(response("503")) == [], "it is the proxy's own"
    exchange.close()
    assert pool.get(ADDRESS).response_errors == 0


def test_a_mode_of_bodies_that_is_not_supported_is_refused(pool):
    """Answers of the other modes would lose the bodies."""
    assert refusal(exchange_of(pool).answer(headers(mode=pb.GRPC))) == 500
    assert pool.get(ADDRESS).num_open == 0


def test_an_overload_is_answered_with_429():
    pool = Pool(lambda: 0.0, max_waiting=1)
    pool.set_addresses([ADDRESS])
    pool.get(ADDRESS).apply(EndpointReport(num_waiting=1), is_ready=True, now_s=0.0)
    assert refusal(exchange_of(pool).answer(headers(end_of_stream=True))) == 429


@pytest.mark.parametrize(
    ("subset", "found"),
    [
        ([ADDRESS, OTHER], True),
        (f"{OTHER}, {ADDRESS}", True),
        ([f"{OTHER},{ADDRESS}"], True),
        ([OTHER], False),
        ([], False),
        ("", False),
        (5, False),
    ],
)
def test_the_subset_hint_limits_the_choice(pool, subset, found):
    [answer] = exchange_of(pool).answer(headers(end_of_stream=True, subset=subset))
    assert found == (answer.WhichOneof("response") == "request_headers")
    if not found:
        assert refusal([answer]) == 503


def test_failed_responses_count_for_the_endpoint(pool):
    """Clients cause 501 and 504: with unsupported paths, and with their time limits."""
    statuses = ("200", "404", "501", "504", "500", "502", "503", "504")
    for status, errors in zip(statuses, (0, 0, 0, 0, 1, 2, 3, 3), strict=True):
        exchange = exchange_of(pool)
        exchange.answer(headers(end_of_stream=True))
        exchange.answer(response(status, end_of_stream=True))
        assert pool.get(ADDRESS).response_errors == errors


def test_an_endpoint_that_served_a_retry_takes_over_the_request(pool):
    pool.set_addresses([ADDRESS, OTHER])
    exchange = exchange_of(pool)
    exchange.answer(headers(end_of_stream=True))
    exchange.answer(response(served=OTHER))
    assert (pool.get(ADDRESS).num_open, pool.get(OTHER).num_open) == (0, 1)
    assert (pool.get(ADDRESS).response_errors, pool.get(OTHER).response_errors) == (1, 0)
    exchange.close()
    assert pool.get(OTHER).num_open == 0


def test_observed_traffic_gets_no_answers(pool):
    message = headers(end_of_stream=True)
    message.observability_mode = True
    assert exchange_of(pool).answer(message) == []
    assert exchange_of(pool).answer(pb.ProcessingRequest()) == []
