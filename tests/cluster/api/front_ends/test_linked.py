# Modules: cluster.api.front_ends.router_end, cluster.api.front_ends.router_client
# Modules: cluster.api.front_ends.remote_engine
# Modules: cluster.api.front_ends.messages
"""Requests through a front end, and the ends of each side."""

import asyncio
import threading
from array import array
from dataclasses import replace

import pytest

from cluster.api.front_ends.front_ends import state_of
from cluster.api.openai.parsers.reasoning import SYNTAXES
from cluster.observability.request_context import current_caller
from cluster.replica.orders import AbortOrder
from specdec.types.errors import (
    AbortedError,
    GrammarError,
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
    UnknownModelError,
)
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SamplingParams, StructuredOutput
from tests.cluster.replica_on_hash_target import PROMPT
from tests.waiting import eventually

GREEDY = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def gate(replica):
    """Holds the target after two steps, so that a stream is open until this event is set."""
    gate, collect, left = threading.Event(), replica.target.collect, [None, None]
    gate.is_reached = threading.Event()

    def collect_at_gate():
        if left:
            left.pop()
        else:
            gate.is_reached.set()
            gate.wait(60)
        return collect()

    replica.target.collect = collect_at_gate
    yield gate
    gate.set()


async def read(router, interval=1, request_id="", budget=None, **params):
    fields = {"request_id": request_id, "stream_interval": interval}
    if budget is not None:
        is_open = SYNTAXES["deepseek_r1"].is_open
        fields["thinking_budget"] = ThinkingBudget(budget, (7, 8, 9), is_open)
    call = GenerateRequest(PROMPT, SamplingParams(**{**GREEDY, **params}), **fields)
    generation = await router.generate(call)
    return [output async for output in generation.outputs]


async def begun(router, **fields):
    """Return a stream of 100 tokens whose first output has been read."""
    params = SamplingParams(**{**GREEDY, "max_tokens": 100})
    generation = await router.generate(GenerateRequest(PROMPT, params, stream_interval=1, **fields))
    await anext(generation.outputs)
    return generation


def answer_of(outputs):
    """Return the contents that a client receives, however they were split into outputs."""
    last = outputs[-1]
    return (
        [token for each in outputs for token in each.token_ids],
        [drafted for each in outputs for drafted in each.is_drafted],
        "".join(each.text for each in outputs),
        [length for each in outputs for length in each.text_lengths],
        sum(each.num_steps for each in outputs),
        (last.finish_reason, last.stop_reason, last.num_output_tokens, last.speculation),
        (last.num_prompt_tokens, last.verifier, last.is_last),
        [each.logprobs.token_ids for each in outputs if each.logprobs is not None],
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"interval": 7, "budget": 9},
        {"temperature": 1.0, "seed": 3},
        {"stop": (" ",), "max_tokens": 80},
        {"stop": ("a stop string that never comes",)},
        {"stop_token_ids": tuple(range(0, 380, 7)), "max_tokens": 80},
        {"stop_token_ids": tuple(range(0, 380, 7)), "include_stop_str_in_output": True},
        {"logprobs": 2},
        {"skip_special_tokens": False, "ignore_eos": False},
    ],
    ids=lambda params: "+".join(params) or "greedy",
)
async def test_an_answer_is_that_of_the_router(replica, front_end, params):
    assert answer_of(await read(front_end.router, **params)) == answer_of(
        await read(replica.router, **params)
    )


async def test_an_admission_is_reported_where_a_client_waits_for_it(front_end, monkeypatch):
    kinds, send, admitted = [], front_end.end._send, []
    monkeypatch.setattr(
        front_end.end, "_send", lambda kind, *rest: kinds.append(kind) or send(kind, *rest)
    )
    await read(front_end.router)
    assert "settled" not in kinds
    call = GenerateRequest(PROMPT, SamplingParams(**GREEDY))
    generation = await front_end.router.generate(call, on_admitted=lambda: admitted.append(1))
    assert [output async for output in generation.outputs]
    assert (kinds.count("settled"), admitted) == (1, [1])


async def test_a_stop_string_ends_the_text_wherever_its_parts_fall(replica, front_end):
    """Every pair of characters that follow each other, in steps of several tokens and of one."""
    [*outputs] = await read(replica.router, max_tokens=40)
    text = "".join(each.text for each in outputs)
    for start in range(0, len(text) - 2, 3):
        stop = (text[start : start + 2],)
        own = answer_of(await read(replica.router, stop=stop, max_tokens=40))
        through = answer_of(await read(front_end.router, stop=stop, max_tokens=40))
        assert through == own
        assert own[5][0] is FinishReason.STOP


async def test_each_choice_has_its_own_text(replica, front_end):
    def choices(outputs):
        return [answer_of([each for each in outputs if each.choice == i])[:4] for i in range(3)]

    params = {"n": 3, "temperature": 1.0, "seed": 5}
    through = await read(front_end.router, **params)
    assert choices(through) == choices(await read(replica.router, **params))
    assert through[-1].is_last


async def test_an_answer_continues_after_the_tokens_that_the_client_has(replica, front_end):
    whole = answer_of(await read(replica.router))
    call = GenerateRequest(PROMPT, SamplingParams(**GREEDY), resume_token_ids=tuple(whole[0][:11]))
    generation = await front_end.router.generate(call)
    rest = answer_of([output async for output in generation.outputs])
    assert rest[0] == whole[0][11:]
    assert rest[2] == whole[2][sum(whole[3][:11]) :]


@pytest.mark.parametrize(("regex", "error"), [("(", InvalidValueError), ("[ab]{3}", GrammarError)])
async def test_a_grammar_is_compiled_by_the_router(replica, front_end, regex, error):
    """The target knows no grammar, so the engine ends the request at its first token."""
    replica.router.text.load()
    with pytest.raises(error, match="structured_output"):
        await read(front_end.router, structured_output=StructuredOutput(regex=regex))


async def test_the_errors_of_the_engine_are_those_of_the_router(front_end):
    with pytest.raises(InvalidValueError, match="max_tokens is 1000; it must be at most"):
        await read(front_end.router, max_tokens=1000)


async def test_the_engine_counts_the_requests_of_all(replica, front_end):
    """The front end alone would have room."""
    thread = replica.router.running_engine().thread
    thread._remote.num_sequences = thread.config.max_num_seqs + thread.config.max_queue_len
    with pytest.raises(OverloadedError):
        await read(front_end.router)


async def test_a_client_that_leaves_ends_its_request(replica, front_end, gate):
    generation = await begun(front_end.router)
    await generation.outputs.aclose()
    gate.set()
    thread = replica.router.running_engine().thread
    await eventually(lambda: not thread.num_sequences)
    stats = await thread.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_a_lost_front_end_ends_its_requests(replica, front_end, gate):
    _open = await begun(front_end.router)
    front_end.client.close()
    gate.set()
    thread = replica.router.running_engine().thread
    await eventually(lambda: not thread.num_sequences)
    assert not (await thread.stats()).num_running


async def test_requests_are_aborted_by_their_id(front_end, gate):
    generation = await begun(front_end.router, request_id="r")
    front_end.end.abort(AbortOrder("other", current_caller.get()))
    front_end.end.abort(AbortOrder("r", current_caller.get()))
    with pytest.raises(AbortedError):
        [output async for output in generation.outputs]


async def test_a_drain_waits_for_open_streams(replica, front_end, gate):
    generation = await begun(front_end.router)
    draining = asyncio.create_task(replica.router.drain(20))
    await asyncio.sleep(0)
    front_end.end.show(state_of(replica.router))
    await eventually(lambda: front_end.client.state.is_draining)
    with pytest.raises(NotReadyError, match="draining"):
        await read(front_end.router)
    gate.set()
    outputs = [output async for output in generation.outputs]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    await draining


async def test_a_drain_ends_what_is_left(replica, front_end, gate):
    generation = await begun(front_end.router)
    await eventually(gate.is_reached.is_set)
    draining = asyncio.create_task(replica.router.drain(0.0))
    await eventually(lambda: replica.router.running_engine().thread._commands)  # that end streams
    gate.set()
    await draining
    with pytest.raises(NotReadyError, match="stopped before the answer was complete"):
        [output async for output in generation.outputs]
    assert not replica.router.running_engine().thread.num_sequences


async def test_a_stream_is_open_until_its_reader_has_the_last_output(replica, front_end):
    call = GenerateRequest(PROMPT, SamplingParams(**GREEDY))
    generation = await front_end.router.generate(call)
    await anext(generation.outputs)
    thread = replica.router.running_engine().thread
    await eventually(lambda: not thread.num_sequences)
    assert front_end.router.num_streams == 1
    [output async for output in generation.outputs]
    assert front_end.router.num_streams == 0


async def test_a_client_that_leaves_while_its_grammar_is_compiled(replica, front_end, monkeypatch):
    compiling, goes_on = asyncio.Event(), asyncio.Event()

    async def compile_later(spec, caller, num_sequences):
        compiling.set()
        await goes_on.wait()

    monkeypatch.setattr(replica.router.text, "compile", compile_later)
    structured = StructuredOutput(regex="a")
    task = asyncio.create_task(read(front_end.router, structured_output=structured))
    await compiling.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: replica.router.metrics.num_refused == 1)  # received, as it has an end
    goes_on.set()
    await asyncio.gather(*front_end.end._tasks)
    assert not replica.router.running_engine().thread.num_sequences
    assert not front_end.end._encoder._numbers


async def test_a_client_that_leaves_before_its_grammar_is_compiled(replica, front_end, monkeypatch):
    """The end of the request arrives together with the request."""
    messages, work = [], []

    async def compile_at_once(spec, caller, num_sequences):
        work.append("compiled")

    def leave(*message):
        messages.append(message)
        task.cancel()

    monkeypatch.setattr(replica.router.text, "compile", compile_at_once)
    monkeypatch.setattr(front_end.end, "_submit", lambda *request: work.append("submitted"))
    monkeypatch.setattr(front_end.router._engine, "_send", leave)
    call = read(front_end.router, structured_output=StructuredOutput(regex="a"))
    task = asyncio.create_task(call)
    await asyncio.gather(task, return_exceptions=True)
    assert [kind for kind, *_ in messages] == ["submit", "withdraw"]
    [*map(front_end.end._receive, messages)]
    await asyncio.gather(*front_end.end._tasks)
    assert not work
    assert not front_end.end._encoder._numbers


async def test_an_error_of_ours_ends_a_call_without_its_details(front_end):
    async def broken(argument):
        yield argument
        raise ZeroDivisionError(argument)

    front_end.end._methods["broken"] = broken
    results = front_end.client.call("broken", "secret")
    assert await anext(results) == "secret"
    with pytest.raises(RuntimeError, match="internal error"):
        await anext(results)


async def test_the_loss_of_the_engine_ends_all_streams(replica, front_end, gate):
    generation = await begun(front_end.router)
    replica.router.running_engine().thread.mark_target_lost(TargetFailedError("rank 1 ended"))
    gate.set()
    with pytest.raises(TargetFailedError):
        async for _ in generation.outputs:
            pass
    front_end.end.show(state_of(replica.router))
    await eventually(lambda: not front_end.router.is_ready)
    assert isinstance(front_end.router.failure, TargetFailedError)


async def test_what_the_router_shows_is_known(replica, front_end):
    assert front_end.router.is_ready
    with pytest.raises(UnknownModelError):
        front_end.router.check_admission("new", 1)
    front_end.end.show(replace(state_of(replica.router), adapter_ids={"new": 3}))
    await eventually(lambda: len(front_end.router.model_infos()) == 2)
    front_end.router.check_admission("new", 1)
    assert [each.model for each in front_end.router.model_infos()] == ["tiny", "new"]


async def test_measurements_are_part_of_those_of_the_router(replica, front_end):
    await read(front_end.router)
    front_end.client.send("counts", front_end.router.metrics.counts, 0)
    await eventually(lambda: replica.router.metrics._parts)
    await read(replica.router)
    counts = replica.router.metrics.counts
    stats = await replica.router.running_engine().thread.stats()
    assert (stats.counts.num_requests, counts.ended["length"]) == (2, 2)
    front_end.client.close()  # one that ends leaves its counts alone
    await eventually(lambda: not replica.router.metrics._parts)
    assert replica.router.metrics.counts == counts


async def test_answers_for_training_are_kept_by_the_router(replica, front_end, monkeypatch):
    kept = []
    monkeypatch.setattr(replica.router, "add_sample", lambda *sample: kept.append(sample))
    front_end.router._samples.add(array("i", [1, 2, 3]), 1, 0.5)
    await eventually(lambda: kept)
    assert kept == [(array("i", [1, 2, 3]), 1, 0.5)]


async def test_a_call_of_the_router_ends_with_its_client(front_end):
    closed = asyncio.Event()

    async def endless(argument):
        try:
            while True:
                yield argument
        finally:
            closed.set()

    front_end.end._methods["endless"] = endless
    results = front_end.client.call("endless", 5)
    assert [await anext(results), await anext(results)] == [5, 5]
    await results.aclose()
    await closed.wait()
