"""`AsyncLLM` on the tiny model: output kinds, closed and aborted streams, several event loops."""

import asyncio
import itertools
import threading
import time
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace

import pytest

from specdec import AsyncLLM, SamplingParams
from specdec.types.errors import InvalidValueError, NotReadyError, TargetFailedError
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker import LocalTarget
from tests.specdec.llm.models import arguments, metrics_of

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
PROMPT = "the water under the bridge is the water under the bridge is"


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        yield llm


async def outputs_of(llm, prompt=PROMPT, params=GREEDY, **options):
    return [each async for each in llm.generate(prompt, params, **options)]


async def test_output_kinds(llm):
    cumulative = await outputs_of(llm, request_id="mine")
    delta = await outputs_of(llm, output_kind="delta")
    [final] = await outputs_of(llm, output_kind="final_only")
    texts = [each.outputs[0].text for each in cumulative]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    whole = cumulative[-1].outputs[0]
    assert whole.token_ids == final.outputs[0].token_ids
    assert [t for each in delta for t in each.outputs[0].token_ids] == whole.token_ids
    assert "".join(each.outputs[0].text for each in delta) == whole.text
    assert [each.finished for each in delta] == [False] * (len(delta) - 1) + [True]
    assert {each.request_id for each in cumulative} == {"mine"}
    assert 1 < len(cumulative) < 20, "drafts that come true share an output"


async def test_deltas_contain_only_choices_with_new_tokens(llm):
    params = SamplingParams(n=3, seed=2, temperature=1.0, max_tokens=6, ignore_eos=True)
    delta = await outputs_of(llm, params=params, output_kind="delta")
    [final] = await outputs_of(llm, params=params, output_kind="final_only")
    for choice in final.outputs:
        parts = [p for each in delta for p in each.outputs if p.index == choice.index]
        assert [t for part in parts for t in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


async def test_concurrent_streams_generate_the_same_as_alone(llm):
    prompts = [PROMPT, "Every spring", "Ask the baker", "When will it open?", "Further south"]
    alone = [(await outputs_of(llm, each))[-1].outputs for each in prompts]
    together = await asyncio.gather(*(outputs_of(llm, each) for each in prompts))
    assert [each[-1].outputs for each in together] == alone


async def test_leaving_a_stream_aborts_its_request(llm):
    before = metrics_of(llm)["request_success abort"]
    async with aclosing(llm.generate(PROMPT, LONG)) as stream:
        await anext(stream)
    await outputs_of(llm)
    after = metrics_of(llm)
    assert (after["request_success abort"], after["num_requests_running"]) == (before + 1, 0)


async def test_a_request_is_aborted_by_its_id(llm):
    before = metrics_of(llm)["request_success abort"]
    outputs = []
    async for output in llm.generate(PROMPT, LONG, "mine"):
        outputs.append(output)
        await llm.abort("mine")
    last = outputs[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert 0 < len(last.outputs[0].token_ids) < 140
    assert metrics_of(llm)["request_success abort"] == before + 1
    await llm.abort("unknown")


async def test_a_request_is_aborted_while_it_is_prepared(llm, monkeypatch):
    """Encoding a long prompt or compiling a grammar can take seconds."""
    before = metrics_of(llm)
    prepare, is_preparing, go_on = llm._llm_engine.prepare, threading.Event(), threading.Event()

    def wait_and_prepare(*arguments):
        is_preparing.set()
        assert go_on.wait(timeout=30)
        return prepare(*arguments)

    monkeypatch.setattr(llm._llm_engine, "prepare", wait_and_prepare)
    asked = SpeculationOptions(verifier="rejection")
    params = SamplingParams(temperature=0, max_tokens=20, speculation=asked)
    mine = asyncio.create_task(outputs_of(llm, params=params, request_id="mine"))
    other = asyncio.create_task(outputs_of(llm, request_id="other"))
    assert await asyncio.to_thread(is_preparing.wait, 30)
    await llm.abort("mine")
    go_on.set()
    [output] = await mine
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert output.outputs[0].token_ids == []
    assert output.verifier == "rejection"
    assert len((await other)[-1].outputs[0].token_ids) == 20
    after = metrics_of(llm)
    assert after["request_success abort"] == before["request_success abort"] + 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(output.prompt_token_ids)


async def test_an_abort_ends_the_compilation_of_a_grammar(llm, monkeypatch):
    """No thread waits for it."""
    compiler, submitted = llm._llm_engine._compiler(), Future()
    is_compiling = asyncio.Event()

    def submit(*_, **__):
        is_compiling.set()
        return submitted

    monkeypatch.setattr(compiler, "submit", submit)
    params = replace(GREEDY, structured_output=StructuredOutput(regex="a+"))
    mine = asyncio.create_task(outputs_of(llm, params=params, request_id="mine"))
    await asyncio.wait_for(is_compiling.wait(), 30)
    await llm.abort("mine")
    [output] = await asyncio.wait_for(mine, 10)
    assert output.outputs[0].finish_reason == "abort"
    assert submitted.cancelled()


@pytest.mark.parametrize("request_id", [3, b"mine"])
async def test_a_request_id_that_is_no_string_is_rejected(llm, request_id):
    with pytest.raises(
        InvalidValueError, match=f"request_id is {request_id!r}; it must be a string"
    ):
        await outputs_of(llm, request_id=request_id)


async def test_a_chat_streams(llm):
    messages = [{"role": "user", "content": "When will it open?"}]
    chat = [each async for each in llm.chat(messages, GREEDY, tools=None)]
    prompt = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert chat[-1].prompt == prompt
    assert chat[-1].outputs == (await outputs_of(llm, prompt))[-1].outputs


async def test_a_stream_raises_the_errors_of_its_request(llm):
    with pytest.raises(InvalidValueError, match="max_tokens is 500"):
        await outputs_of(llm, params=SamplingParams(max_tokens=500))
    two = [[{"role": "user", "content": "a"}]] * 2
    with pytest.raises(InvalidValueError, match=r"messages\[0\] is \[.*; it must be a mapping"):
        await anext(llm.chat(two, GREEDY))
    with pytest.raises(InvalidValueError, match="output_kind is 'all'; it must be one of cumu"):
        await outputs_of(llm, output_kind="all")


@pytest.mark.parametrize("priority", [None, "1", 1.5, True])
async def test_an_invalid_priority_is_rejected_and_other_requests_continue(llm, priority):
    with pytest.raises(InvalidValueError, match=f"priority is {priority!r}; it must be a whole"):
        await outputs_of(llm, priority=priority)
    assert len((await outputs_of(llm, priority=-1))[-1].outputs[0].token_ids) == 20


@pytest.mark.parametrize("digits", [20, 400, 5000])
async def test_a_priority_without_a_place_in_the_queue_is_rejected(llm, digits):
    with pytest.raises(InvalidValueError, match=r"priority is .*; it must be from -9"):
        await outputs_of(llm, priority=10**digits)


async def test_speculation_is_changed_while_a_stream_runs(llm):
    stream = llm.generate(PROMPT, LONG)
    await anext(stream)
    llm.set_speculation(mode="off")
    outputs = [each async for each in stream]
    llm.set_speculation(mode="auto")
    [whole] = await outputs_of(llm, params=LONG, output_kind="final_only")
    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert outputs[-1].speculation.num_drafts < whole.speculation.num_drafts


def test_successive_event_loops(tiny_model_dir):
    async def leave_one(llm):
        stream = llm.generate(PROMPT, LONG)
        return await anext(stream)

    with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        first = asyncio.run(outputs_of(llm))
        asyncio.run(leave_one(llm))
        second = asyncio.run(outputs_of(llm))
    assert second[-1].outputs == first[-1].outputs


def test_a_failed_engine_stays_failed_on_another_event_loop(tiny_model_dir, monkeypatch):
    def lose(*_):
        raise TargetFailedError("gone")

    with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm._llm_engine._executor.target, "collect", lose)
            with pytest.raises(TargetFailedError, match="could not be started again"):
                asyncio.run(outputs_of(llm))
        with pytest.raises(TargetFailedError, match="could not be started again"):
            asyncio.run(outputs_of(llm))


def test_another_event_loop_is_rejected_while_models_restart(tiny_model_dir, monkeypatch):
    go_on = threading.Event()

    def lose(*_):
        raise TargetFailedError("gone")

    async def leave_while_recovering(llm):
        stream = asyncio.create_task(outputs_of(llm))
        while not llm._llm_engine.engine.thread.is_recovering:
            await asyncio.sleep(0.01)
        stream.cancel()

    with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        executor = llm._llm_engine._executor
        expected = asyncio.run(outputs_of(llm))[-1].outputs

        def start_again():
            assert go_on.wait(timeout=30)
            return LocalTarget(executor.target._runner)

        monkeypatch.setattr(executor, "restart_target", start_again)
        with monkeypatch.context() as patch:
            patch.setattr(executor.target, "collect", lose)
            asyncio.run(leave_while_recovering(llm))
        with pytest.raises(NotReadyError, match="being started again"):
            asyncio.run(outputs_of(llm))
        go_on.set()
        while llm._llm_engine.engine.thread.is_recovering:
            time.sleep(0.01)
        assert asyncio.run(outputs_of(llm))[-1].outputs == expected


async def test_requests_after_shutdown_are_rejected(tiny_model_dir):
    async with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        await outputs_of(llm)
    with pytest.raises(NotReadyError, match="shut down"):
        await outputs_of(llm)


async def test_a_stream_that_is_open_at_shutdown_ends_with_an_error(tiny_model_dir):
    async with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(NotReadyError):
            [each async for each in stream]
