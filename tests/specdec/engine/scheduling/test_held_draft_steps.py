"""Steps with drafts that the ranks hold: retries, admission and blocks as without them."""

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from tests.specdec.engines import (
    HashTarget,
    engine_config,
    make_engine,
    request,
    run,
)
from tests.specdec.spied_runs import K


def test_a_row_with_bad_logits_is_retried_without_the_held_drafts(tiny_model_dir):
    """The step ahead is the retry: the rank has no draft after a row without tokens."""

    class BadTarget(HashTarget):
        num_left = 1

        def _verify(self, context, row):
            if row.num_draft_tokens and len(context) > 15 and self.num_left:
                self.num_left -= 1
                return ()
            return super()._verify(context, row)

    speculation = SpeculativeConfig.of("medusa", K, model="head")
    config = engine_config(speculation=speculation, async_scheduling=True)
    target = BadTarget(4, 383, lambda text, count: [11] * count)
    engine = make_engine(tiny_model_dir, config, target)
    text = run(engine, [request("a", [10, 11, 12], max_tokens=40)])["a"].token_ids
    assert text == target.continuation([10, 11, 12], 40)
    assert target.num_left == 0
    assert target.num_held > 3


def test_a_seat_that_accepted_drafts_free_is_filled_one_step_later(tiny_model_dir):
    """The step ahead has a row of the sequence that may end, and the rows of the others."""
    joined = {}
    for is_async in (False, True):
        speculation = SpeculativeConfig.of("medusa", K, model="head")
        config = engine_config(speculation=speculation, max_num_seqs=2, async_scheduling=is_async)
        target = HashTarget(4, 383)
        target._head = lambda text, count, target=target: [
            token + (place == 2) for place, token in enumerate(target.continuation(text, count))
        ]
        engine = make_engine(tiny_model_dir, config, target)
        lengths = (25, 39, 26, 17, 33)
        asked = [request(f"r{i}", [i, 7], max_tokens=n) for i, n in enumerate(lengths)]
        run(engine, asked)
        assert (target.num_held > 5) == is_async
        joined[is_async] = [step.step_id for step in target.steps for _ in step.admitted]
    assert joined[False] == [0, 0, 9, 14, 19]
    assert joined[True] == [0, 0, 10, 15, 20]


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_blocks_are_reserved_for_the_highest_position_and_no_more(tiny_model_dir, method):
    """Nothing lies after the last slot that a sequence may have."""
    speculation = SpeculativeConfig.of(method, K, model="head")
    changes = {"max_model_len": 40, "num_blocks": 10, "async_scheduling": True}
    config = engine_config(speculation=speculation, **changes)
    target = HashTarget(4, 383)
    target._head = target.continuation
    engine = make_engine(tiny_model_dir, config, target)
    text = run(engine, [request("a", [10, 11, 12], max_tokens=None)])["a"].token_ids
    assert text == target.continuation([10, 11, 12], 37)
    assert target.num_held > 3
    assert engine.stats().counts.num_preemptions == 0
