# Modules: specdec.engine.scheduling.decode_run, specdec.sequences.decode_rows
"""Steps that repeat the decodes of the step before: when they do, and what ends it."""

from dataclasses import replace
from random import Random

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.requests.outputs import TargetLostError
from specdec.engine.scheduling import step_drafts
from specdec.engine.scheduling.decode_run import DecodeRun
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.sequences.sequence import Sequence
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.errors import TargetFailedError
from specdec.types.messages import PENDING_TOKEN, StepRow, VerifiedRow
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.chaos.simulation import LossyTarget
from tests.specdec.engines import (
    HashTarget,
    Transcript,
    engine_config,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer

FIRST = tuple(StepRow(7 + i, 5 * i, (PENDING_TOKEN,), 0, True, max_end=90) for i in range(3))
OFF = SpeculationControl("off", 32, 3)
NUM_TOKENS = 30


def test_repeated_rows_are_one_token_later_each_time():
    rows = RepeatedRows.after(RepeatedRows.after(FIRST))
    expected = [row._replace(num_computed_tokens=row.num_computed_tokens + 2) for row in FIRST]
    assert [*rows] == expected
    assert (rows[1], len(rows), rows[1:]) == (expected[1], 3, tuple(expected[1:]))


def test_rows_leave_and_join_between_repeats():
    rows = RepeatedRows.after(RepeatedRows.after(FIRST))
    late, later = FIRST[0]._replace(seq_id=20, num_computed_tokens=33), FIRST[0]._replace(seq_id=21)
    joined = RepeatedRows.after(rows, left=(8,), joining=(late,))
    third = [row._replace(num_computed_tokens=row.num_computed_tokens + 3) for row in FIRST]
    assert [*joined] == [third[0], third[2], late]
    assert (len(joined), joined.left) == (3, (8,))
    moved = late._replace(num_computed_tokens=34)
    fourth = [row._replace(num_computed_tokens=row.num_computed_tokens + 1) for row in third]
    after = RepeatedRows.after(joined, left=(7,), joining=(later,))
    assert [*after] == [fourth[2], moved, later]
    assert [*RepeatedRows.after(after, left=(20, 21))] == [
        fourth[2]._replace(num_computed_tokens=fourth[2].num_computed_tokens + 1)
    ]


def test_sampled_tokens_are_rows_of_one_token():
    rows = SampledTokens((7, 9), (30, 31))
    assert [*rows] == [VerifiedRow(7, (30,)), VerifiedRow(9, (31,))]
    assert (rows[1].token_ids, len(rows)) == ((31,), 2)


class LostOnce(HashTarget):
    """A target that is lost in the `collect` after `is_lost` is set, with one end token."""

    is_lost = False
    end_token: int | None = None  # the 13th token of a text that begins with 41

    def collect(self):
        if self.is_lost:
            raise TargetFailedError("lost")
        return super().collect()

    def next_token(self, context):
        if self.end_token is not None and context[0] == 41 and len(context) == 12:
            return self.end_token
        return super().next_token(context)


class Engine:
    """Three sequences that decode, in an engine whose drafts are switched off."""

    def __init__(self, directory, *, detokenize=False, **changes):
        self.detokenize = detokenize
        config = engine_config(3, async_scheduling=True, **{"max_num_seqs": 3, **changes})
        self._make_target = lambda: LostOnce(config.block_size, 383)
        self.target = self._make_target()
        policy = SpeculationPolicy(OFF, lambda: 0.0)
        self.engine = make_engine(directory, config, self.target, policy=policy)
        self.expected, self.found = {}, {}
        for name, length in (("a", 5), ("b", 7), ("c", 4)):
            self.add(name, [20 + length] * length)

    def add(self, name, prompt, **params):
        params = {"max_tokens": NUM_TOKENS, **params}
        self.engine.add(replace(request(name, prompt, **params), detokenize=self.detokenize))
        self.expected[name] = self.target.continuation(prompt, params["max_tokens"])
        self.found[name] = Transcript()

    def abort(self, name):
        self.engine.abort(name)
        self.expected[name] = self.found[name].token_ids

    def lose(self):
        self.target.is_lost = True

    def step(self):
        try:
            outputs = self.engine.step()
        except TargetLostError as error:
            outputs = error.outputs
            self.target = self._make_target()
            self.engine.replace_target(self.target)
        for output in outputs:
            if not self.detokenize:
                output = output.with_text("", (0,) * len(output.token_ids))
            self.found[output.request_id].add(output)
        self.engine.check_integrity()
        for seq in self.engine._scheduler._running:
            known = seq.seq_id, seq.token_ids, seq.num_computed_tokens
            assert not self.engine._blocks.unpublished_keys(*known)

    @property
    def repeats(self):
        return [isinstance(step.rows, RepeatedRows) for step in self.target.steps]

    def run_until_repeated(self):
        while not (self.repeats and self.repeats[-1]):
            self.step()

    def end(self):
        while self.engine.has_work:
            self.step()
        assert {name: each.token_ids for name, each in self.found.items()} == self.expected


def test_a_row_of_another_length_than_its_sequence_is_refused():
    seq = Sequence(7, request("a", [1, 2]), SamplingRules(), detokenizer=None)
    run = DecodeRun([], [], [[]])
    for open_length in (0, 90):
        seq.open_length = open_length
        assert run.changed(set(), [(seq, FIRST[0])], 0).ends_at(89)
    seq.open_length = 89
    with pytest.raises(AssertionError, match="compares no lengths"):
        run.changed(set(), [(seq, FIRST[0])], 0)


def test_all_steps_of_a_run_but_the_first_are_repeats(tiny_model_dir):
    run = Engine(tiny_model_dir)
    run.end()
    assert sum(run.repeats) > NUM_TOKENS - 6


EVENTS = {
    "drafts are switched on": lambda run: run.engine.set_speculation(
        SpeculationControl("on", 32, 3)
    ),
    "drafts are set as before": lambda run: run.engine.set_speculation(OFF),
    "the target is lost": Engine.lose,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("num_more", range(3))
def test_a_step_after_an_event_is_no_repeat_of_those_before(tiny_model_dir, event, num_more):
    run = Engine(tiny_model_dir)
    run.run_until_repeated()
    for _ in range(num_more):
        run.step()
    assert run.repeats[-1]
    EVENTS[event](run)
    run.step()
    assert run.repeats == [] or not run.repeats[-1]
    run.end()


def test_a_sequence_that_ends_leaves_the_others_repeated(tiny_model_dir):
    run = Engine(tiny_model_dir)
    run.run_until_repeated()
    run.abort("b")
    run.step()
    rows = run.target.steps[-1].rows
    assert run.repeats[-1]
    assert ([row.seq_id for row in rows], rows.left, rows.joining) == ([0, 2], (1,), ())
    run.end()


def test_a_sequence_joins_with_its_prompt_and_then_its_first_token(tiny_model_dir):
    run = Engine(tiny_model_dir, max_num_seqs=4, max_num_batched_tokens=7)
    run.run_until_repeated()
    run.step()
    run.add("late", [3, 1, 4, 1, 5, 9])
    joining = []
    for _ in range(4):
        run.step()
        assert run.repeats[-1]
        joining.append([len(row.token_ids) for row in run.target.steps[-1].rows.joining])
    assert joining == [[4], [2], [1], []]
    run.end()


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_that_joins_is_computed_at_once(tiny_model_dir, length):
    """Also one of which a chunk leaves a single token: 5 and 9 in chunks of 4."""
    run = Engine(tiny_model_dir, max_num_seqs=4, max_num_batched_tokens=7)
    run.run_until_repeated()
    run.step()
    run.add("late", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9][:length])
    for _ in range(2 + -(-length // 4)):
        run.step()
        assert run.repeats[-1]
    assert run.found["late"].token_ids
    run.end()


def random_run(directory, seed):
    """Run requests of any length that come, go and share prefixes, in an engine of any size."""
    random = Random(seed)
    run = Engine(
        directory,
        detokenize=random.choice((True, False)),
        num_blocks=300,
        max_num_seqs=random.choice((3, 4, 8)),
        max_num_batched_tokens=random.choice((8, 11, 64)),
        max_prefill_tokens=random.choice((None, 4, 5)),
        enable_prefix_caching=random.choice((True, False)),
    )
    for index in range(24):
        prompt = [random.randrange(5, 9)] * random.randrange(1, 30)
        run.add(f"r{index}", prompt, max_tokens=random.randrange(1, 25))
        for _ in range(random.randrange(6)):
            run.step()
        if random.random() < 0.2:
            run.abort(f"r{random.randrange(index + 1)}")
    run.end()
    return run


@pytest.mark.parametrize("seed", range(12))
def test_steps_are_those_without_repeats(tiny_model_dir, monkeypatch, seed):
    def what_runs(run):
        return [
            (
                sorted(row[:5] for row in step.rows),
                sorted(step.released),
                sorted(each.seq_id for each in step.admitted),
                sorted((each.seq_id, each.start) for each in step.block_table_deltas),
            )
            for step in run.target.steps
        ]

    run = random_run(tiny_model_dir, seed)
    assert sum(run.repeats) > 0.6 * len(run.repeats)
    monkeypatch.setattr(step_drafts, "repeat_decodes", lambda *_: [])
    plain = random_run(tiny_model_dir, seed)
    assert sum(plain.repeats) == 0
    assert what_runs(run) == what_runs(plain)


def test_a_sequence_that_waits_for_a_seat_does_not_end_the_run(tiny_model_dir):
    run = Engine(tiny_model_dir)
    run.run_until_repeated()
    run.add("late", [3, 1, 4, 1, 5])
    run.step()
    assert run.repeats[-1]
    run.end()


@pytest.mark.parametrize("detokenize", [True, False])
@pytest.mark.parametrize("kind", ["stop token", "end of sequence"])
def test_a_length_and_a_token_end_sequences_of_a_run(tiny_model_dir, detokenize, kind):
    run = Engine(tiny_model_dir, max_num_seqs=5, detokenize=detokenize)
    run.add("short", [40] * 6, max_tokens=8)
    if kind == "stop token":
        stop = run.target.continuation([41] * 6, 12)[-1]
        params = {"stop_token_ids": (stop,)}
    else:
        [stop] = ModelConfig.from_directory(tiny_model_dir).eos_token_ids
        run.target.end_token = stop
        params = {"ignore_eos": False}
    run.add("stopped", [41] * 6, max_tokens=20, **params)
    tokens = run.expected["stopped"]
    run.expected["stopped"] = tokens[: tokens.index(stop) + 1]
    run.end()
    sizes = [
        len(step.rows)
        for step, repeats in zip(run.target.steps, run.repeats, strict=True)
        if repeats
    ]
    assert {5, 4, 3} >= set(sizes) >= {3}


def test_a_preemption_ends_the_run(tiny_model_dir):
    run = Engine(tiny_model_dir, num_blocks=22, max_model_len=48)
    run.end()
    assert run.engine.stats().counts.num_preemptions
    assert {
        len(step.rows)
        for step, repeats in zip(run.target.steps, run.repeats, strict=True)
        if repeats
    } >= {3}


def test_a_row_that_was_dropped_is_not_repeated(tmp_path):
    """Its sequence has recurrent layers, and bad logits of drafts while a step ahead runs."""
    save_family(tmp_path, "lfm2-plain")
    train_tokenizer(383).save_pretrained(tmp_path)
    policy, made = SpeculationPolicy(replace(OFF, mode="on"), lambda: 0.0), []
    decide, are_bad = policy.decide, []

    def decide_off(*loads):
        if made[0].stats().counts.num_steps == 4:
            policy.update(OFF)
            are_bad.append(True)
        return decide(*loads)

    policy.decide = decide_off
    reference = HashTarget(4, 383)
    target = LossyTarget(reference.continuation, lambda: bool(are_bad and are_bad.pop()))
    speculation = SpeculativeConfig.of("medusa", 3, model="head")
    config = engine_config(speculation=speculation, async_scheduling=True, keeps_guesses=True)
    made.append(make_engine(tmp_path, config, target, policy=policy))
    prompts = {name: [each, 11, 12] for each, name in enumerate("ab")}
    asked = [request(name, prompt, max_tokens=40) for name, prompt in prompts.items()]
    expected = {name: reference.continuation(prompt, 40) for name, prompt in prompts.items()}
    assert tokens_by(made[0], asked) == expected
    assert made[0].stats().counts.num_preemptions == 1
    assert target.num_repeated > 20
