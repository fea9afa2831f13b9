import numpy as np
import pytest

from specdec.sequences.output_buffer import ToldTokens, UntoldTokens
from specdec.types.messages import Logprobs


def logprobs_of(count):
    ids = np.arange(count, dtype=np.int32)
    return Logprobs(ids.reshape(-1, 1), ids.reshape(-1, 1).astype(np.float32), ids + 1)


def test_the_first_tokens_are_due_at_once():
    untold = UntoldTokens(interval=10)
    untold.add([5], None, 0)
    assert untold.is_due
    assert untold.take() == ToldTokens((5,), None, 1, (False,))
    assert untold.take() == ToldTokens()


@pytest.mark.parametrize(("interval", "counts"), [(1, [1]), (3, [1, 1, 1]), (3, [2, 4]), (5, [5])])
def test_later_ones_are_due_once_there_are_enough(interval, counts):
    untold = UntoldTokens(interval)
    untold.add([0], None, 0)
    untold.take()
    for index, count in enumerate(counts):
        untold.add(range(count), None, 0)
        assert untold.is_due == (index == len(counts) - 1)
    told = untold.take()
    assert (len(told.token_ids), told.num_steps) == (sum(counts), len(counts))
    assert not untold.is_due


def test_the_second_ones_go_with_those_of_others_and_no_later_ones_do():
    untold = UntoldTokens(interval=4)
    untold.add([0], None, 0)
    assert not untold.joins({4}), "the first ones wait for nobody"
    untold.take()
    untold.add([1], None, 0)
    assert not untold.joins({1, 3, 5})
    assert untold.joins({3, 4})
    untold.take()
    untold.add([2, 3, 4], None, 0)
    assert not untold.joins({4})


def test_logprobs_are_joined_in_order():
    untold = UntoldTokens(interval=9)
    untold.add([1, 2], logprobs_of(2), 1)
    untold.add([3], logprobs_of(1), 0)
    logprobs = untold.take().logprobs
    assert logprobs is not None
    assert logprobs.ranks.tolist() == [1, 2, 1]


def test_what_was_drafted_is_known_of_each_token():
    untold = UntoldTokens(interval=9)
    untold.add([1, 2, 3], None, 2)
    untold.add([4], None, 0)
    untold.add([5, 6], None, 2)
    assert untold.take().is_drafted == (True, True, False, False, True, True)
    assert untold.take().is_drafted == ()
