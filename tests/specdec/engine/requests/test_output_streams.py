"""Outputs that wait for the reader of a request."""

import asyncio

import pytest

from specdec.engine.requests.output_streams import OutputStream, OutputStreams
from specdec.types.deadline import Deadline
from specdec.types.errors import DeadlineExceededError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import OWN_PROCESS
from specdec.types.responses import EngineOutput, FinishReason


def output(token, choice=0, *, num_so_far=0, reason=None, is_last=False):
    text = chr(ord("a") + token % 26)
    counts = (3, num_so_far, SpeculationStats())
    return EngineOutput("r", (token,), text, reason, *counts)._replace(
        choice=choice, is_drafted=(token % 2 == 0,), text_lengths=(1,), is_last=is_last
    )


@pytest.fixture
def stream():
    return OutputStream("r", None, OWN_PROCESS)


async def test_a_late_reader_gets_all_at_once(stream):
    for token in range(3):
        stream.put(output(token, num_so_far=token + 1))
    taken = await stream.take()
    assert (taken.token_ids, taken.text, taken.text_lengths) == ((0, 1, 2), "abc", (1, 1, 1))
    assert (taken.is_drafted, taken.num_steps) == ((True, False, True), 3)
    assert taken.num_output_tokens == 3


async def test_tokens_of_plain_decodes_follow_the_output_before_them(stream):
    first = output(1, num_so_far=1)._replace(verifier="synthetic", num_cached_tokens=2)
    stream.put(first)
    assert await stream.take() is first
    stream.put_token(8)
    stream.put_token(9)
    taken = await stream.take()
    fields = {"token_ids": (8, 9), "text": "", "text_lengths": (), "num_steps": 2}
    assert taken == first._replace(**fields, is_drafted=(False, False), num_output_tokens=3)
    stream.put_token(7)
    stream.put(output(2, num_so_far=5, reason=FinishReason.STOP, is_last=True))
    taken = await stream.take()
    assert (taken.token_ids, taken.num_steps, taken.is_last) == ((7, 2), 2, True)
    assert (taken.num_output_tokens, taken.is_drafted) == (5, (False, True))


async def test_a_reader_that_waits_gets_a_token_and_no_huge_output(stream):
    stream.put(output(0, num_so_far=1))
    await stream.take()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put_token(5)
    assert (await reader).token_ids == (5,)
    for token in range(10_000):
        stream.put_token(token)
    stream.fail(ValueError("the end"))
    stream.put_token(1)
    taken = [await stream.take() for _ in range(3)]
    assert [len(each.token_ids) for each in taken] == [4096, 4096, 1808]
    assert taken[-1].num_output_tokens == 10_002
    with pytest.raises(ValueError, match="the end"):
        await stream.take()


async def test_many_tokens_before_another_output_are_all_read(stream):
    stream.put(output(0, num_so_far=1))
    for token in range(5000):
        stream.put_token(token)
    stream.put(output(6, num_so_far=5002, reason=FinishReason.STOP, is_last=True))
    taken = await stream.take()
    assert taken.token_ids == (0, *range(5000), 6)


async def test_an_error_right_after_the_admission_hides_no_output(stream):
    admission = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(stream.wait_for(admission))
    await asyncio.sleep(0)
    admission.set_result(None)
    stream.put(output(1))
    stream.fail(ValueError("later"))
    await waiting
    assert (await stream.take()).token_ids == (1,)
    with pytest.raises(ValueError, match="later"):
        await stream.take()


async def test_a_reader_that_waits_gets_each_output_as_it_is(stream):
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    sent = output(1)
    stream.put(sent)
    assert await reader is sent


async def test_the_choice_that_ends_the_request_is_read_last(stream):
    stream.put(output(1, choice=1))
    stream.put(output(2, choice=0, reason=FinishReason.STOP))
    stream.put(output(3, choice=1, reason=FinishReason.LENGTH, is_last=True))
    taken = [await stream.take() for _ in range(3)]
    assert [each.token_ids for each in taken] == [(1,), (2,), (3,)]
    assert [each.is_last for each in taken] == [False, False, True]
    assert taken[-1].finish_reason is FinishReason.LENGTH


async def test_a_long_wait_costs_memory_by_token_and_no_huge_output(stream):
    tokens = tuple(range(10_000))
    for token in tokens:
        stream.put(output(token))
    [parts] = stream._parts.values()
    assert len(parts) < 10_000 / 64 + 64
    stream.put(output(10_000, reason=FinishReason.STOP, is_last=True))
    taken = [await stream.take()]
    while not taken[-1].is_last:
        taken.append(await stream.take())
    assert tuple(token for each in taken for token in each.token_ids) == (*tokens, 10_000)
    assert max(len(each.token_ids) for each in taken) <= 64 * 64


async def test_an_error_comes_after_the_outputs_before_it(stream):
    stream.put(output(1))
    stream.fail(ValueError("the first"))
    stream.fail(ValueError("another"))
    assert (await stream.take()).token_ids == (1,)
    for _ in range(2):
        with pytest.raises(ValueError, match="the first"):
            await stream.take()


async def test_an_error_ends_a_stream_whose_reader_stays_late(stream):
    stream.put(output(1))
    stream.fail(ValueError("the end"))
    stream.put(output(2))
    assert (await stream.take()).token_ids == (1,)
    with pytest.raises(ValueError, match="the end"):
        await stream.take()


async def test_each_choice_has_its_turn_for_a_reader_that_stays_late(stream):
    taken = []
    for token in range(9):
        for choice in range(3):
            stream.put(output(token, choice=choice))
        taken.append(await stream.take())
    assert [each.choice for each in taken] == [0, 1, 2] * 3


async def test_the_first_output_of_the_choice_that_ends_the_request_is_not_late(stream):
    """It has the log-probabilities of the prompt."""
    stream.put(output(1, choice=0))
    stream.put(output(2, choice=1, reason=FinishReason.STOP))
    stream.put(output(3, choice=0, reason=FinishReason.STOP, is_last=True))
    taken = [await stream.take() for _ in range(3)]
    assert [(each.choice, each.is_last) for each in taken] == [(0, False), (1, False), (0, True)]


async def test_a_deadline_ends_a_stream_and_is_forgotten_with_it():
    streams = OutputStreams()
    late = streams.open("r", 1, None, OWN_PROCESS, Deadline.after(0.01))
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s"):
        await late.take()
    streams.close(late)
    early = streams.open("r", 1, None, OWN_PROCESS, Deadline.after(60))
    timer = early.timer
    streams.close(early)
    assert timer.cancelled()
