"""Times of drafting and verification, by a clock that target and proposer advance."""

from dataclasses import dataclass, field

import pytest

from specdec.types.errors import TargetFailedError
from specdec.types.messages import VerifiedRow, VerifyOutput
from tests.clock import Clock
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config, make_engine, request

PROMPT = [11, 12, 13, 14, 11, 12]


@dataclass
class Recorded:
    """Keeps what the engine records."""

    drafts: list[float] = field(default_factory=list)
    verifications: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list, compare=False)

    def record_draft(self, seconds):
        self.drafts.append(seconds)

    def record_verify(self, seconds):
        self.verifications.append(seconds)

    def record_ahead(self, began_at_s, seconds):
        raise AssertionError("nothing drafts ahead here")

    def record_batch(self, num_sequences, num_tokens):
        self.batches.append(num_sequences)
        self.tokens.append(num_tokens)


class Slow:
    """Advances the clock by 1 s in begin, 2 s in collect and 3 s in take."""

    def __init__(self, inner, clock):
        self.inner = inner
        self.clock = clock
        self.error = None

    def begin(self, what):
        self.clock.now_s += 1
        self.inner.begin(what)

    def collect(self):
        self.clock.now_s += 2
        if self.error is not None:
            raise self.error
        return self.inner.collect()

    def take(self, requests):
        self.clock.now_s += 3
        return self.inner.take(requests)

    def ahead(self, rows):
        self.inner.ahead(rows)

    def end_step(self, *, is_lost=False):
        self.inner.end_step(is_lost=is_lost)

    def release(self, seq_id):
        self.inner.release(seq_id)


@pytest.fixture
def target():
    return HashTarget(block_size=4, vocab_size=383)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorded():
    return Recorded()


def engine_of(tiny_model_dir, target, clock, recorded, num_draft_tokens=0, **changes):
    config = engine_config(num_draft_tokens, **changes)
    proposer = Slow(ScriptedProposer(target.continuation), clock)
    return make_engine(
        tiny_model_dir, config, Slow(target, clock), proposer, recorder=recorded, clock=clock
    )


def test_a_step_is_timed_from_begin_to_the_end_of_collect(tiny_model_dir, target, clock, recorded):
    engine = engine_of(tiny_model_dir, target, clock, recorded, 3)
    engine.add(request("r", PROMPT, max_tokens=9))
    engine.step()
    assert recorded == Recorded(), "a prefill without drafts, in flight"
    clock.now_s += 10
    engine.step()  # 10 seconds, 1 to begin and 2 to collect
    assert recorded == Recorded([3.0], [13.0], [1])
    clock.now_s += 100
    engine.step()
    assert recorded.verifications == [13.0, 103.0]


def test_a_step_without_drafts_records_no_draft_time(tiny_model_dir, target, clock, recorded):
    engine = engine_of(tiny_model_dir, target, clock, recorded, 3)
    engine.add(request("r", PROMPT, max_tokens=1))
    while engine.has_work:
        engine.step()
    assert recorded == Recorded([], [3.0], [1])
    assert recorded.tokens == [len(PROMPT) + 1]


def test_the_tokens_of_steps_are_those_of_prompts_and_answers(
    tiny_model_dir, target, clock, recorded
):
    engine = engine_of(tiny_model_dir, target, clock, recorded, 3)
    for name in ("r", "s"):
        engine.add(request(name, PROMPT, max_tokens=9))
        while engine.has_work:
            engine.step()
    cached = engine.stats().counts.num_cached_tokens
    assert cached > 0
    assert recorded.tokens == sorted(recorded.tokens)
    assert recorded.tokens[-1] == 2 * (len(PROMPT) + 9) - cached


def test_a_lost_step_is_not_recorded(tiny_model_dir, target, clock, recorded):
    engine = engine_of(tiny_model_dir, target, clock, recorded)
    engine.add(request("r", PROMPT))
    engine.step()
    engine._steps.target.error = TargetFailedError("lost")
    with pytest.raises(TargetFailedError):
        engine.step()
    assert recorded == Recorded()


def test_a_proposer_releases_ended_sequences(tiny_model_dir, target, clock, recorded):
    engine = engine_of(tiny_model_dir, target, clock, recorded, 3)
    engine.add(request("r", PROMPT))
    engine.step()
    engine.abort("r")
    assert engine._speculator._proposer.inner.released == [0]


class Endless:
    """Yields a token for each row; steps may be begun while another is in flight."""

    def __init__(self):
        self.begun = []

    def begin(self, step):
        self.begun.append(step)

    def collect(self):
        step = self.begun.pop(0)
        rows = tuple(VerifiedRow(row.seq_id, (11,)) for row in step.rows)
        return VerifyOutput(step.step_id, rows)


def test_a_step_begun_ahead_is_timed_from_the_end_of_the_previous_one(
    tiny_model_dir, clock, recorded
):
    config = engine_config(async_scheduling=True)
    target = Slow(Endless(), clock)
    engine = make_engine(tiny_model_dir, config, target, recorder=recorded, clock=clock)
    engine.add(request("r", PROMPT))
    engine.step()  # begins a
    clock.now_s += 10
    engine.step()  # begins b, then collects a, which took 1 + 10 + 1 + 2 seconds
    clock.now_s += 5
    engine.step()  # begins c, then collects b, 5 + 1 + 2 seconds after a
    assert recorded.verifications == [14, 8]
