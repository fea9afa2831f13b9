"""Snapshots travel in steps, and are kept once the step that takes them is committed."""

import pytest

from tests.chaos.recurrent import RecurrentTarget
from tests.specdec.engines import engine_config, make_engine, request, run
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer

PROMPT = [10 + place % 4 for place in range(42)]
NUM_SNAPSHOTS = 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    save_family(directory, "lfm2-plain")
    train_tokenizer(383).save_pretrained(directory)
    return directory


def new_engine(directory, has_bad_logits=lambda: False, **changes):
    """Return an engine on a recurrence, and its target."""
    config = engine_config(
        **{"block_size": 2, "keeps_guesses": True, "snapshot_interval": 8}
        | {"num_snapshots": NUM_SNAPSHOTS, **changes}
    )
    sizes = {"num_seqs": config.max_num_seqs, "num_snapshots": config.num_snapshots}
    target = RecurrentTarget("".format, has_bad_logits, block_size=2, **sizes)
    return make_engine(directory, config, target), target


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_and_outputs_are_saved_at_the_same_positions(directory, is_async):
    engine, target = new_engine(directory, async_scheduling=is_async)
    run(engine, [request("a", PROMPT, max_tokens=30)])
    assert target.saved == [16, 32, 40, 48, 56, 64]
    assert (engine.stats().counts.num_steps_ahead > 0) == is_async
    assert engine.stats().num_snapshots == 5  # 64 has replaced 56


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_ends_leaves_the_snapshot_of_its_last_step(directory, is_async):
    engine, target = new_engine(directory, async_scheduling=is_async)
    first = run(engine, [request("a", PROMPT, max_tokens=7)])["a"].token_ids
    assert target.saved[-1] == 48
    run(engine, [request("b", [*PROMPT, *first, 11, 12], max_tokens=1)])
    assert engine.stats().counts.num_resumed_tokens == 48


@pytest.mark.parametrize("is_async", [False, True])
def test_a_snapshot_of_an_aborted_request_is_dropped(directory, is_async):
    engine, target = new_engine(directory, async_scheduling=is_async)
    engine.add(request("a", PROMPT))
    engine.step()
    engine.abort("a")
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert target.saved == [16]
    assert engine.stats().num_snapshots == 0
    assert len(engine._blocks.snapshots._free) == NUM_SNAPSHOTS


def test_a_snapshot_after_bad_logits_is_dropped(directory):
    """The row with drafts is run again, from the last snapshot before it."""
    bad = iter([True])
    engine, target = new_engine(directory, lambda: next(bad, False), num_draft_tokens=3)
    found = run(engine, [request("a", [10] * 40 + [11], max_tokens=20)])["a"].token_ids
    assert found == target.continuation([10] * 40 + [11], 20)
    counts = engine.stats().counts
    assert (counts.num_preemptions, counts.num_resumed_tokens) == (1, 40)
    engine.check_integrity()


def test_a_lost_target_has_no_snapshots(directory):
    engine, target = new_engine(directory)
    engine.add(request("a", PROMPT))
    while len(target.saved) < 2:
        engine.step()
    other = new_engine(directory)[1]
    engine.replace_target(other)
    assert engine.stats().num_snapshots == 0
    while engine.has_work:
        engine.step()
    assert other.saved[:3] == [16, 32, 40]
    assert engine.stats().counts.num_resumed_tokens == 0
