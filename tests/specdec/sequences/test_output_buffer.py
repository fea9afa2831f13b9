import numpy as np
import pytest

from specdec.sequences.output_buffer import BufferedTokens, OutputBuffer
from specdec.types.messages import Logprobs


def logprobs_of(count):
    ids = np.arange(count, dtype=np.int32)
    return Logprobs(ids.reshape(-1, 1), ids.reshape(-1, 1).astype(np.float32), ids + 1)


def test_the_first_tokens_are_due_at_once():
    buffer = OutputBuffer(interval=10)
    buffer.add((5,), None, 0)
    assert buffer.is_due
    assert buffer.take() == BufferedTokens((5,), None, 1, (False,))
    assert buffer.take() == BufferedTokens()


@pytest.mark.parametrize(("interval", "counts"), [(1, [1]), (3, [1, 1, 1]), (3, [2, 4]), (5, [5])])
def test_later_tokens_are_due_once_the_interval_is_full(interval, counts):
    buffer = OutputBuffer(interval)
    buffer.add((0,), None, 0)
    buffer.take()
    for index, count in enumerate(counts):
        buffer.add(tuple(range(count)), None, 0)
        assert buffer.is_due == (index == len(counts) - 1)
    tokens = buffer.take()
    assert (len(tokens.token_ids), tokens.num_steps) == (sum(counts), len(counts))
    assert not buffer.is_due


def test_only_the_second_output_joins_those_of_other_choices():
    buffer = OutputBuffer(interval=4)
    buffer.add((0,), None, 0)
    assert not buffer.joins({4}), "the first ones do not wait"
    buffer.take()
    buffer.add((1,), None, 0)
    assert not buffer.joins({1, 3, 5})
    assert buffer.joins({3, 4})
    buffer.take()
    buffer.add((2, 3, 4), None, 0)
    assert not buffer.joins({4})


def test_logprobs_are_joined_in_order():
    buffer = OutputBuffer(interval=9)
    buffer.add((1, 2), logprobs_of(2), 1)
    buffer.add((3,), logprobs_of(1), 0)
    logprobs = buffer.take().logprobs
    assert logprobs is not None
    assert logprobs.ranks.tolist() == [1, 2, 1]


def test_each_token_records_whether_it_was_drafted():
    buffer = OutputBuffer(interval=9)
    buffer.add((1, 2, 3), None, 2)
    buffer.add((4,), None, 0)
    buffer.add((5, 6), None, 2)
    assert buffer.take().is_drafted == (True, True, False, False, True, True)
    assert buffer.take().is_drafted == ()


@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("num_drafted", [0, 2])
def test_single_tokens_are_passed_as_they_are_added_and_taken(interval, num_drafted):
    passing, adding = OutputBuffer(interval), OutputBuffer(interval)
    for token in range(8):
        is_last = token == 7
        if num_drafted and token == 3:  # a step with drafts between them
            for each in (passing, adding):
                each.add((90, 91, 92), None, num_drafted)
        adding.add((token,), None, 0)
        expected = adding.take() if is_last or adding.is_due else None
        assert passing.pass_token(token, is_last=is_last) == expected
        assert passing.joins({interval}) == adding.joins({interval})
    assert passing.take() == BufferedTokens()
