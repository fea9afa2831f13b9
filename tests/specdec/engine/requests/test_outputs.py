"""Outputs of a step, which are made where they are read."""

from dataclasses import replace

import pytest

from specdec.engine.requests.outputs import continued
from tests.specdec.engines import HashTarget, engine_config, make_engine, request

PROMPT = (5, 6, 7, 8, 9)


def without_text(request_id, **params):
    return replace(request(request_id, PROMPT, **params), detokenize=False)


def generated(engine, *requests):
    """Return the outputs of each step and what streams get of them, until all requests end."""
    for each in requests:
        engine.add(each)
    while engine.has_work:
        step = engine.step()
        yield list(step), step.delivery


@pytest.fixture
def engine(tiny_model_dir):
    target = HashTarget(block_size=4, vocab_size=383)
    return make_engine(tiny_model_dir, engine_config(async_scheduling=True), target)


def test_a_token_has_the_output_that_its_step_would_have_made(engine):
    """Usage, verifier and all else are those of the output before, as streams take them to be."""
    requests = [without_text(name, max_tokens=20) for name in "ab"]
    latest, num_tokens = {}, 0
    for outputs, (whole, request_ids, token_ids) in generated(engine, *requests):
        made = {each.request_id: each for each in outputs}
        assert made.keys() == {*(each.request_id for each in whole), *request_ids}
        latest |= {each.request_id: each for each in whole}
        for name, token_id in zip(request_ids, token_ids, strict=True):
            last = latest[name]
            counts = last.num_output_tokens + 1, last.speculation, 1
            latest[name] = continued(last, (token_id,), *counts)
            num_tokens += 1
        assert made == {name: latest[name] for name in made}
    assert num_tokens > 20, "most outputs are tokens"
    assert all(each.is_last and each.num_output_tokens == 20 for each in latest.values())


@pytest.mark.parametrize(
    "only",
    [
        without_text("a", n=2),
        replace(without_text("a"), stream_interval=2),
        replace(without_text("a"), detokenize=True),
        without_text("a", stop_token_ids=[382]),
    ],
)
def test_outputs_with_more_than_a_token_are_whole(engine, only):
    assert not any(delivery.token_ids for _, delivery in generated(engine, only))


def test_an_output_with_its_text_differs_in_nothing_else(engine):
    for outputs, _ in generated(engine, without_text("a", max_tokens=5)):
        for each in outputs:
            assert each.with_text("ab", (1, 1)) == each._replace(text="ab", text_lengths=(1, 1))
