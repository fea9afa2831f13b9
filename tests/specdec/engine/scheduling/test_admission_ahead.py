# Modules: specdec.engine.scheduling.blocks_ahead
"""Requests that join steps begun ahead of the one in flight, and those that have to wait for it."""

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.specdec.engine.scheduling.test_async_scheduling import (
    PROMPTS,
    answers,
    engine_on,
    run_on,
    step,
    summary_of,
)
from tests.specdec.engines import Transcript, engine_config, request, run


def join_beside(engine, target, second, **params):
    """Add a request while the prompt of another is in flight.

    Return the step that it joins, and whether this was begun ahead.
    """
    engine.add(request("first", PROMPTS[2]))
    engine.step()
    engine.add(request("second", second, **params))
    num_steps = len(target.steps)
    engine.step()
    return next(each for each in target.steps[num_steps:] if each[0].admitted)


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_request_joins_a_step_that_is_begun_ahead(tiny_model_dir, is_caching):
    config = engine_config(async_scheduling=True, enable_prefix_caching=is_caching)
    engine, target = engine_on(tiny_model_dir, config)
    joined, is_ahead = join_beside(engine, target, PROMPTS[0])
    assert is_ahead
    assert [row.is_pending for row in joined.rows] == [True, False]
    assert engine.newly_scheduled == ("second",)


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_request_waits_for_a_block_that_the_step_in_flight_completes(tiny_model_dir, is_caching):
    """It shares this block then, and the four after it."""
    config = engine_config(async_scheduling=True, enable_prefix_caching=is_caching)
    engine, target = engine_on(tiny_model_dir, config)
    joined, is_ahead = join_beside(engine, target, [*PROMPTS[2][:20], 9, 9])
    assert is_ahead != is_caching
    assert engine.newly_scheduled == ("second",)
    assert engine.stats().counts.num_cached_tokens == (20 if is_caching else 0)
    assert joined.rows[-1].num_known_tokens == (2 if is_caching else 22)


def test_a_request_that_shares_another_block_does_not_wait(tiny_model_dir):
    """The step in flight completes no block, or one of another prompt or salt."""
    engine, target = engine_on(tiny_model_dir, engine_config(async_scheduling=True))
    engine.add(request("first", PROMPTS[2]))
    engine.step()
    engine.add(replace(request("salted", PROMPTS[2]), cache_salt="salt"))
    engine.step()
    engine.step()
    engine.add(request("second", PROMPTS[2]))
    engine.step()
    admitted = [is_ahead for step, is_ahead in target.steps if step.admitted]
    assert admitted == [False, True, True]
    assert engine.stats().counts.num_cached_tokens == 20


def test_prompt_log_probabilities_need_no_block_in_flight(tiny_model_dir):
    """The whole prompt is computed for them."""
    engine_and_target = engine_on(tiny_model_dir, engine_config(async_scheduling=True))
    _, is_ahead = join_beside(*engine_and_target, PROMPTS[2], prompt_logprobs=1)
    assert is_ahead


@pytest.mark.parametrize("ends", [True, False])
def test_a_seat_is_filled_in_the_step_after_a_certain_end(tiny_model_dir, ends):
    """After a stop token it is filled one step later: the step ahead has a row of its sequence."""
    config = engine_config(max_num_seqs=1, async_scheduling=True)
    alone, _ = engine_on(tiny_model_dir, config)
    [first, *_] = run(alone, [request("first", PROMPTS[0])])["first"].token_ids
    end = {"max_tokens": 1} if ends else {"stop_token_ids": [first]}
    engine, target = engine_on(tiny_model_dir, config)
    engine.add(request("first", PROMPTS[0], **end))
    engine.add(request("second", PROMPTS[1]))
    for _ in range(3):
        engine.step()
    [_, (joined, is_ahead)] = [each for each in target.steps if each[0].admitted]
    assert (joined.step_id, is_ahead, joined.released) == ((1 if ends else 2), True, (0,))


@pytest.mark.parametrize("event", ["abort", "loss"])
def test_an_admission_in_flight_that_is_undone(tiny_model_dir, event):
    """Its blocks serve another request, or it is run again with the same tokens."""
    config = engine_config(async_scheduling=True, max_model_len=32, num_blocks=10)
    asked = [
        request("first", PROMPTS[0], max_tokens=9),
        request("second", PROMPTS[2], temperature=1.0, seed=3, max_tokens=9),
        request("third", PROMPTS[3], temperature=1.0, seed=5, max_tokens=9),
    ]
    plain = answers(engine_on(tiny_model_dir, config)[0], asked)
    engine, target = engine_on(tiny_model_dir, config)
    transcripts = defaultdict(Transcript)
    engine.add(asked[0])
    step(engine, transcripts)
    engine.add(asked[1])
    step(engine, transcripts)
    assert (target.num_in_flight, target.steps[-1][0].admitted[0].seq_id) == (1, 1)
    if event == "abort":
        engine.abort("second")
        del plain["second", 0]
    else:
        engine.replace_target(engine_on(tiny_model_dir, config)[1])
    engine.add(asked[2])
    run_on(engine, transcripts)
    assert summary_of(transcripts) == plain
    assert engine.stats().num_free_blocks == config.num_blocks
