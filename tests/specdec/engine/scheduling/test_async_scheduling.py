# Modules: specdec.engine.scheduling.anticipated
# Modules: specdec.engine.scheduling.step_drafts
"""Asynchronous scheduling: steps begun before the tokens of the one in flight are known."""

import time
from collections import defaultdict
from dataclasses import replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.scheduling import step_drafts
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import make_proposer
from specdec.types.control import SpeculationControl
from specdec.types.errors import TargetFailedError
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.worker import RankModel, load_target
from tests.clock import Clock
from tests.specdec.engines import (
    Transcript,
    draft_model,
    engine_config,
    frozen,
    make_engine,
    request,
    run,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.spied_runs import SpiedTarget


class SpiedChooser(GoodputChooser):
    """Keeps the seconds of the steps that it observes."""

    def __init__(self):
        super().__init__(CostModel(CostTable((1,), (0, 3), ((1.0, 2.0),))))
        self.seconds = []

    def observe_step(self, num_decoding, shape, timing, *, is_typical):
        if is_typical:
            self.seconds.append(timing.seconds)
        super().observe_step(num_decoding, shape, timing, is_typical=is_typical)


PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [5] * 21, [3, 1, 4, 1, 5, 9, 2, 6])


def engine_on(directory, config, group=None, policy=None, proposer=None):
    runner = load_target(RankModel(directory, "float32", config), group or TensorParallelGroup())
    target = SpiedTarget(runner)
    return make_engine(directory, config, target, proposer, policy, clock=frozen), target


def varied_requests():
    return [
        request("greedy", PROMPTS[0], max_tokens=30),
        request("short", PROMPTS[1], max_tokens=1),
        request("drawn", PROMPTS[2], temperature=0.9, top_p=0.95, seed=7, max_tokens=17),
        request("penalties", PROMPTS[3], repetition_penalty=1.3, frequency_penalty=0.5),
        request("stops", PROMPTS[0], temperature=1.0, seed=3, ignore_eos=False, max_tokens=60),
        request("choices", PROMPTS[1], temperature=1.0, seed=5, n=3, max_tokens=12),
        request("logprobs", PROMPTS[3], logprobs=2, prompt_logprobs=1, stop=["e"], max_tokens=40),
        request("bad words", PROMPTS[2], bad_words=["a", "b"], min_tokens=9, max_tokens=25),
    ]


def repetitive_requests():
    return [
        request(f"repetitive {i}", [7 + i, 8, 9, 10 + i] * 6, max_tokens=40, seed=i, temperature=t)
        for i, t in enumerate((0.0, 0.7, 0.0))
    ]


def run_on(engine, transcripts):
    """Steps until everything has ended; transcripts are by request and choice."""
    while engine.has_work:
        step(engine, transcripts)


def step(engine, transcripts):
    for output in engine.step():
        transcripts[output.request_id, output.choice].add(output)
    engine.check_integrity()


def answers(engine, requests):
    transcripts = defaultdict(Transcript)
    for each in requests:
        engine.add(each)
    run_on(engine, transcripts)
    return summary_of(transcripts)


def summary_of(transcripts):
    return {
        name: (
            each.token_ids,
            each.text,
            each.finish_reason,
            [row.tolist() for part in each.logprobs for row in part.logprobs],
        )
        for name, each in transcripts.items()
    }


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 45}, {"max_num_seqs": 3}])
def test_tokens_are_those_of_synchronous_scheduling(tiny_model_dir, changes):
    outcomes = {}
    for is_async in (False, True):
        config = engine_config(**changes, async_scheduling=is_async)
        engine, target = engine_on(tiny_model_dir, config)
        outcomes[is_async] = answers(engine, varied_requests())
        assert (target.num_ahead > 0) == is_async
        assert engine.stats().counts.num_steps_ahead == target.num_ahead
        if "num_blocks" in changes:
            assert engine.stats().counts.num_preemptions > 0
    assert outcomes[True] == outcomes[False]


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 45}, {"max_num_seqs": 3}])
def test_repeated_decodes_are_the_rows_that_scheduling_finds(tiny_model_dir, monkeypatch, changes):
    config = engine_config(**changes, async_scheduling=True)

    def steps():
        engine, target = engine_on(tiny_model_dir, config)
        answers(engine, varied_requests())
        return [
            (replace(step, rows=tuple(sorted(step.rows))), is_ahead)
            for step, is_ahead in target.steps
        ]

    num_repeated, repeat = 0, step_drafts.repeat_decodes

    def count(*args):
        nonlocal num_repeated
        rows = repeat(*args)
        num_repeated += bool(rows)
        return rows

    monkeypatch.setattr(step_drafts, "repeat_decodes", count)
    repeated = steps()
    monkeypatch.setattr(step_drafts, "repeat_decodes", lambda *_: [])
    assert repeated == steps()
    assert num_repeated > 10


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_has_the_pending_tokens(tiny_model_dir, num_ranks):
    def of_rank(is_async):
        def outcome(group):
            config = engine_config(async_scheduling=is_async)
            engine, target = engine_on(tiny_model_dir, config, group)
            generated = answers(engine, varied_requests())
            assert (target.num_ahead > 10) == is_async
            return generated

        return outcome

    plain = run_ranks(num_ranks, of_rank(is_async=False))
    assert run_ranks(num_ranks, of_rank(is_async=True)) == plain


def test_requests_added_and_aborted_while_steps_run_ahead(tiny_model_dir):
    outcomes = {}
    for is_async in (False, True):
        engine, target = engine_on(tiny_model_dir, engine_config(async_scheduling=is_async))
        transcripts = defaultdict(Transcript)
        for index in range(6):
            engine.add(request(f"r{index}", PROMPTS[index % 4], seed=index, temperature=0.8))
            for _ in range(4):
                step(engine, transcripts)
            if index == 3:
                engine.abort("r1")
        run_on(engine, transcripts)
        del transcripts["r1", 0]  # how far it came is not defined
        outcomes[is_async] = summary_of(transcripts)
        assert (target.num_ahead > 10) == is_async
    assert outcomes[True] == outcomes[False]


def test_no_row_runs_ahead_after_a_length_limit(tiny_model_dir):
    engine, target = engine_on(tiny_model_dir, engine_config(async_scheduling=True))
    run(engine, [request("a", PROMPTS[0], max_tokens=5), request("b", PROMPTS[1], max_tokens=9)])
    assert sum(len(step.rows) for step, _ in target.steps) == 5 + 9
    assert target.num_ahead == len(target.steps) - 1


def test_one_row_ahead_is_discarded_after_a_stop_token(tiny_model_dir):
    plain, _ = engine_on(tiny_model_dir, engine_config())
    token_ids = run(plain, [request("a", PROMPTS[0])])["a"].token_ids
    stop = next(token for token in token_ids[3:] if token_ids.count(token) == 1)
    num_tokens = token_ids.index(stop) + 1
    engine, target = engine_on(tiny_model_dir, engine_config(async_scheduling=True))
    done = run(engine, [request("a", PROMPTS[0], stop_token_ids=[stop])])["a"]
    assert done.token_ids == token_ids[:num_tokens]
    assert len(target.steps) == num_tokens + 1
    assert engine.stats().counts.num_generated_tokens == num_tokens


def test_chunks_of_a_prompt_run_ahead(tiny_model_dir):
    """All steps but the first."""
    outcomes = {}
    for is_async in (False, True):
        config = engine_config(max_prefill_tokens=4, async_scheduling=is_async)
        engine, target = engine_on(tiny_model_dir, config)
        transcripts = defaultdict(Transcript)
        engine.add(request("a", PROMPTS[0], max_tokens=30))
        for _ in range(4):
            step(engine, transcripts)
        engine.add(request("b", list(range(5, 55)), max_tokens=9, temperature=1.0, seed=4))
        run_on(engine, transcripts)
        outcomes[is_async] = summary_of(transcripts)
        if is_async:
            assert [i for i, (_, is_ahead) in enumerate(target.steps) if not is_ahead] == [0]
            chunks = [row for step, _ in target.steps for row in step.rows if not row.samples]
            assert len(chunks) == 12
    assert outcomes[True] == outcomes[False]


def test_a_prompt_alone_runs_ahead_beside_a_draft_model(tiny_model_dir):
    """The draft model catches up meanwhile, as with synchronous scheduling."""
    steps = {}
    for is_async in (False, True):
        speculation = SpeculativeConfig.of("draft_model")
        config = engine_config(
            speculation=speculation, max_num_batched_tokens=16, async_scheduling=is_async
        )
        drafter = draft_model(tiny_model_dir, max_catch_up_tokens=20)
        proposer = make_proposer(speculation, drafter)
        engine, target = engine_on(tiny_model_dir, config, proposer=proposer)
        run(engine, [request("a", list(range(3, 67)), max_tokens=12)])
        steps[is_async] = [
            (len(row.token_ids), row.num_draft_tokens)
            for step, _ in target.steps
            for row in step.rows
        ]
        assert [is_ahead for _, is_ahead in target.steps[:4]] == [False, *[is_async] * 3]
    assert steps[True] == steps[False]


def test_the_prefix_cache_serves_as_many_tokens(tiny_model_dir):
    """No sequence is admitted ahead of a step that computes a prefix of it."""
    num_cached = {}
    for is_async in (False, True):
        config = engine_config(max_prefill_tokens=6, async_scheduling=is_async)
        engine, target = engine_on(tiny_model_dir, config)
        transcripts = defaultdict(Transcript)
        for index in range(6):
            engine.add(request(f"r{index}", [*range(5, 45), index], n=2, seed=index))
            for _ in range(index):
                step(engine, transcripts)
        run_on(engine, transcripts)
        num_cached[is_async] = engine.stats().counts.num_cached_tokens
        assert (target.num_ahead > 20) == is_async
    assert num_cached[True] == num_cached[False] > 300


def test_no_step_runs_ahead_with_a_grammar(tiny_model_dir):
    compiler = grammar_compiler(tiny_model_dir)
    spec = StructuredOutput(regex="[a-z]{8,20}")
    held = request("held", PROMPTS[0], structured_output=spec, max_tokens=40)
    engine, target = engine_on(tiny_model_dir, engine_config(async_scheduling=True))
    for each in (replace(held, grammar=compiler.compile(spec)), request("free", PROMPTS[1])):
        engine.add(each)
    engine.step()
    while engine.stats().num_running == 2:
        engine.step()
        assert target.num_ahead == 0
    run_on(engine, defaultdict(Transcript))
    assert target.num_ahead > 0


def test_waiting_requests_join_as_early_as_with_synchronous_scheduling(tiny_model_dir):
    num_steps = {}
    for is_async in (False, True):
        config = engine_config(max_num_seqs=2, async_scheduling=is_async)
        engine, target = engine_on(tiny_model_dir, config)
        lengths = (5, 9, 6, 7, 3)
        answers(engine, [request(f"r{i}", [i, 7], max_tokens=n) for i, n in enumerate(lengths)])
        assert (target.num_ahead > 5) == is_async
        num_steps[is_async] = len(target.steps)
    assert num_steps[True] == num_steps[False]


def test_decisions_and_times_are_those_of_synchronous_scheduling(tiny_model_dir):
    """A discarded step is neither decided nor timed."""
    found = {}
    for is_async in (False, True):
        clock = Clock()
        chooser = SpiedChooser()
        control = SpeculationControl("off", threshold=8, num_speculative_tokens=3)
        policy = SpeculationPolicy(control, clock, choosers={None: chooser})
        config = engine_config(3, async_scheduling=is_async)
        engine, target = engine_on(tiny_model_dir, config, policy=policy)
        collect = target.collect

        def slow_collect(clock=clock, collect=collect):
            clock.now_s += 1
            return collect()

        target.collect = slow_collect
        token_ids = run(engine, [request("a", PROMPTS[0])])["a"].token_ids
        stop = next(token for token in token_ids[3:] if token_ids.count(token) == 1)
        clock.now_s += 60
        run(engine, [request("b", PROMPTS[0], stop_token_ids=[stop])])
        clock.now_s += 60
        run(engine, [request("c", PROMPTS[0], stop_token_ids=[token_ids[0]])])
        assert (target.num_ahead > 10) == is_async
        found[is_async] = chooser.seconds, engine.stats().counts.decisions
    assert found[True] == found[False]
    assert set(found[True][0]) == {1.0}


def test_new_settings_apply_from_the_next_step(tiny_model_dir):
    control = SpeculationControl("off", threshold=8, num_speculative_tokens=3)
    policy = SpeculationPolicy(control, time.monotonic)
    config = engine_config(3, async_scheduling=True)
    engine, target = engine_on(tiny_model_dir, config, policy=policy)
    engine.add(request("a", [5, 6] * 9, max_tokens=60))
    for _ in range(6):
        engine.step()
    assert target.num_ahead >= 4
    engine.set_speculation(replace(control, mode="on"))
    num_steps = len(target.steps)
    engine.step()
    assert not target.steps[num_steps][1], "a step was begun under the earlier settings"
    for _ in range(10):
        engine.step()
    assert engine.stats().counts.speculation.num_drafts > 0
    engine.set_speculation(replace(control, mode="off"))
    num_steps = len(target.steps)
    for _ in range(4):
        engine.step()
    assert all(is_ahead for _, is_ahead in target.steps[num_steps + 1 :])
    assert engine.stats().decision.num_draft_tokens == 0


def test_a_lost_target_loses_both_steps_in_flight(tiny_model_dir):
    config = engine_config(async_scheduling=True)
    plain = answers(engine_on(tiny_model_dir, config)[0], [request("a", PROMPTS[0])])
    engine, target = engine_on(tiny_model_dir, config)
    transcripts = defaultdict(Transcript)
    engine.add(request("a", PROMPTS[0]))
    for _ in range(5):
        step(engine, transcripts)

    def lose():
        raise TargetFailedError("lost")

    target.collect = lose
    with pytest.raises(TargetFailedError):
        engine.step()
    assert target.num_in_flight == 2
    _, successor = engine_on(tiny_model_dir, config)
    engine.replace_target(successor)
    run_on(engine, transcripts)
    assert summary_of(transcripts) == plain
