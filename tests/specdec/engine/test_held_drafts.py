"""Steps begun after a step with drafts, whose drafts the target's ranks hold.

Tokens, drafts and counts are those of synchronous scheduling, which verifies the same drafts.
"""

from dataclasses import replace
from functools import cache

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sequences.prediction import PredictedText
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.errors import TargetFailedError
from specdec.types.request import ThinkingBudget
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.worker import HeadFiles, RankModel, load_target
from tests.specdec.engines import (
    engine_config,
    local_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import HEADS
from tests.specdec.spied_runs import K, Run, SpiedTarget, prompt, requests, target_with_head

KERNELS = ["torch"] + ["native"] * (native_library() is not None)
FAST = [("medusa", "torch"), ("eagle3", KERNELS[-1])]
HEADS_AND_KERNELS = [
    pytest.param(method, kernels, marks=[] if (method, kernels) in FAST else pytest.mark.slow)
    for method in HEADS
    for kernels in KERNELS
]
SCARCE = [
    {"num_blocks": 45},
    {"max_num_batched_tokens": 12, "max_num_seqs": 3},
    {"max_prefill_tokens": 5, "num_blocks": 60},
]
"""Limits by which drafts are cut, or sequences preempted, at other places than by default."""

FAST_SCARCE = [("medusa", "torch", 0), ("eagle3", KERNELS[-1], 2)]
SCARCE_HEADS = [
    pytest.param(
        method,
        kernels,
        changes,
        marks=[] if (method, kernels, index) in FAST_SCARCE else pytest.mark.slow,
        id=f"{method}-{kernels}-{index}",
    )
    for method in HEADS
    for kernels in KERNELS
    for index, changes in enumerate(SCARCE)
]


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    """Return what no speculation yields."""
    runner = load_target(
        RankModel(tiny_model_dir, "float32", engine_config(0)), TensorParallelGroup()
    )
    return Run(tiny_model_dir, engine_config(0), SpiedTarget(runner)).finish(requests())


@pytest.fixture(scope="module")
def head_dir_of(tiny_model_dir, tmp_path_factory, plain):
    prompts = {each.request_id: each.prompt_token_ids for each in requests()}
    texts = [
        [*prompts[name], *tokens]
        for (name, _), (tokens, *_) in plain.tokens.items()
        if len(tokens) > 10
    ]
    return cache(
        lambda method: HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), texts)
    )


def outcome_of(directory, head_dir, method, kernels, is_async, **changes):
    made = Run.with_head(directory, head_dir, method, kernels, async_scheduling=is_async, **changes)
    return made.finish(requests())


def assert_same_drafts(found, expected, least):
    """Compare the drafts after the same texts as far as both go."""
    common = found.keys() & expected.keys()
    assert len(common) >= least
    for place in common:
        for one, other in zip(found[place], expected[place], strict=False):
            length = min(len(one), len(other))
            assert one[:length] == other[:length], place


@pytest.mark.parametrize(("method", "kernels"), HEADS_AND_KERNELS)
def test_tokens_and_drafts_are_those_of_synchronous_scheduling(
    tiny_model_dir, head_dir_of, plain, method, kernels
):
    ahead, in_turn = (
        outcome_of(
            tiny_model_dir,
            head_dir_of(method),
            method,
            kernels,
            is_async,
            max_num_batched_tokens=128,
        )
        for is_async in (True, False)
    )
    assert ahead.tokens == in_turn.tokens == plain.tokens
    assert ahead.drafts == in_turn.drafts
    assert ahead.counts.speculation == in_turn.counts.speculation
    assert ahead.counts.accepted_by_position == in_turn.counts.accepted_by_position
    assert ahead.counts.speculation.num_accepted_tokens > 20
    assert ahead.target.num_held > 40
    assert in_turn.target.num_ahead == 0


@pytest.mark.parametrize(("method", "kernels", "changes"), SCARCE_HEADS)
def test_scarce_blocks_and_budgets_change_no_token(
    tiny_model_dir, head_dir_of, plain, method, kernels, changes
):
    ahead, in_turn = (
        outcome_of(tiny_model_dir, head_dir_of(method), method, kernels, is_async, **changes)
        for is_async in (True, False)
    )
    assert ahead.tokens == plain.tokens
    assert_same_drafts(ahead.drafts, in_turn.drafts, 20)
    assert ahead.target.num_held > 10
    assert (ahead.counts.num_preemptions > 0) == (changes.get("num_blocks", 200) < 50)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_holds_the_same_drafts(tiny_model_dir, head_dir_of, plain, num_ranks):
    head_dir = head_dir_of("medusa")

    def outcome(group):
        made = Run.with_head(
            tiny_model_dir,
            head_dir,
            group=group,
            async_scheduling=True,
            max_num_batched_tokens=128,
        )
        return made.finish(requests())

    ranks = run_ranks(num_ranks, outcome)
    for each in ranks:
        assert each.tokens == plain.tokens
        assert each.drafts == ranks[0].drafts
        assert each.target.num_held > 40


def test_every_step_runs_ahead_and_takes_its_drafts_on_the_rank(tiny_model_dir, head_dir_of):
    """All but the first step; a row's position is the highest that is possible."""
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=True)
    made.finish([request("a", prompt(0), max_tokens=30)])
    sent = [(row, is_ahead) for step, is_ahead in made.target.steps for row in step.rows]
    assert [is_ahead for _, is_ahead in sent] == [False] + [True] * (len(sent) - 1)
    assert len(sent) < 20, "drafts were accepted"
    assert all(row.is_pending and not row.drafts for row, _ in sent[1:])
    assert [row.drafting.num_held for row, _ in sent[1:6]] == [K] * 5
    drafts = {length: each for (_, _, length), [each] in made.drafts.items()}
    lengths = [9 + 1, *sorted(drafts)[1:]]
    positions = [row.num_computed_tokens for row, _ in sent[1 : len(lengths) + 1]]
    assert positions[0] == 9
    for before, position in zip(lengths, positions[1:], strict=False):
        assert position == before + len(drafts[before])


def test_a_row_ahead_is_discarded_after_an_end_within_a_draft(tiny_model_dir, head_dir_of, plain):
    token_ids = plain.tokens["greedy", 0][0]
    stop = next(token for token in token_ids[4:] if token_ids.count(token) == 1)
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=True)
    other = request("other", prompt(0), max_tokens=30)
    done = made.finish([request("a", prompt(0), stop_token_ids=[stop]), other])
    assert done.tokens["a", 0][0] == token_ids[: token_ids.index(stop) + 1]
    assert done.tokens["other", 0][0] == token_ids, "no block of it was written by the other"
    again = made.finish([request("again", [*prompt(0), *token_ids[:20]], max_tokens=9)])
    assert again.tokens["again", 0][0] == token_ids[20:29], "published blocks hold the right KV"
    assert again.counts.num_cached_tokens > 8


def test_requests_added_and_aborted_while_steps_run_ahead(tiny_model_dir, head_dir_of):
    outcomes = {}
    for is_async in (False, True):
        made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=is_async)
        for index in range(6):
            made.engine.add(request(f"r{index}", prompt(index % 4), seed=index, temperature=0.8))
            for _ in range(3):
                made.step()
            if index == 3:
                made.engine.abort("r1")
        outcomes[is_async] = made.finish()
        del made.transcripts["r1", 0]  # how far it came is not defined
        outcomes[is_async].tokens = made.tokens
    assert outcomes[True].tokens == outcomes[False].tokens
    assert outcomes[True].drafts == outcomes[False].drafts
    assert outcomes[True].target.num_held > 10


@pytest.mark.parametrize(
    ("method", "kernels"),
    [("medusa", "torch"), pytest.param("eagle3", KERNELS[-1], marks=pytest.mark.slow)],
)
def test_toggles_take_effect_as_with_synchronous_scheduling(
    tiny_model_dir, head_dir_of, plain, method, kernels
):
    counts = [4, 0, 4, 2, 0, 3]
    outcomes = {}
    for is_async in (False, True):
        made = Run.with_head(
            tiny_model_dir,
            head_dir_of(method),
            method,
            kernels,
            async_scheduling=is_async,
            max_num_batched_tokens=128,
            max_num_seqs=16,
        )
        for each in requests():
            made.engine.add(each)
        for place, count in enumerate(counts):
            mode = "on" if count else "off"
            made.engine.set_speculation(SpeculationControl(mode, 32, count))
            for _ in range(1 + place % 3):
                made.step()
        outcomes[is_async] = made.finish()
    assert outcomes[True].tokens == plain.tokens
    assert outcomes[True].drafts == outcomes[False].drafts
    assert outcomes[True].target.num_held > 20


def test_the_policy_may_stop_drafts_after_a_step_with_drafts(tiny_model_dir, head_dir_of, plain):
    """It decides for the step after the one in flight, whose rows then have no draft."""
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=True)
    policy = made.engine._speculator.policy
    decide = policy.decide
    off, on = (SpeculationControl(mode, 32, K) for mode in ("off", "on"))

    def alternate(*loads):
        policy.update(on if len(made.target.steps) // 3 % 2 else off)
        return decide(*loads)

    policy.decide = alternate
    outcome = made.finish(requests())
    assert outcome.tokens == plain.tokens
    ahead = [step for step, is_ahead in outcome.target.steps if is_ahead]
    kinds = {any(row.drafting.num_held for row in step.rows) for step in ahead}
    assert kinds == {False, True}
    assert outcome.counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["medusa", "ngram"])
def test_the_policy_observes_what_it_does_with_synchronous_scheduling(
    tiny_model_dir, head_dir_of, method
):
    """Drafts that were wanted, made and accepted, to the end of the request."""
    observed = {}
    for is_async in (False, True):
        keys = {"model": str(head_dir_of(method))} if method in HEADS else {"prompt_lookup_min": 1}
        speculation = SpeculativeConfig.of(method, K, **keys)
        config = engine_config(speculation=speculation, async_scheduling=is_async)
        policy = SpeculationPolicy(SpeculationControl("on", 32, K), clock=lambda: 0.0)
        rows = observed[is_async] = []
        policy.observe_rows = lambda _, *counts, is_tree, rows=rows: rows.append(counts)
        head = HeadFiles(head_dir_of(method), method=method) if method in HEADS else None
        engine = local_engine(tiny_model_dir, config, policy=policy, head=head, kernels="torch")
        run(engine, [request("a", prompt(0)[:4] * 6, max_tokens=30)])
        assert (engine.stats().counts.num_steps_ahead > 0) == is_async
    assert observed[True] == observed[False]
    assert any(made for _, made, _ in observed[True])


@pytest.mark.parametrize("is_async", [False, True])
def test_drafts_end_at_a_thinking_budget(tiny_model_dir, head_dir_of, plain, is_async):
    """The head drafts after the mark that the budget adds as after a prompt."""
    closing, asked, expected = (7, 8, 9), [], {}
    for index, each in enumerate(requests()):
        if each.params.n == 1 and each.params.logprobs is None and each.params.max_tokens > 15:
            count = 2 + index
            known = (*plain.tokens[each.request_id, 0][0][:count], *closing)
            resumed = replace(each, resume_token_ids=known)
            [rest] = tokens_by(local_engine(tiny_model_dir, engine_config(0)), [resumed]).values()
            expected[each.request_id] = [*known, *rest]
            asked.append(replace(each, thinking_budget=ThinkingBudget(count, closing, bool)))
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=is_async)
    outcome = made.finish(asked)
    assert {name: each[0] for (name, _), each in outcome.tokens.items()} == expected
    assert len(expected) > 3
    assert outcome.counts.speculation.num_accepted_tokens > 0


def test_a_lost_target_loses_both_steps_in_flight(tiny_model_dir, head_dir_of, plain):
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=True)
    collect = made.target.collect

    def lose_both():
        if made.target.num_held > 20 and len(made.target._steps) == 2:
            raise TargetFailedError("lost")
        return collect()

    made.target.collect = lose_both
    with pytest.raises(TargetFailedError):
        made.finish(requests())
    assert made.engine.stats().num_running > 3
    successor = target_with_head(tiny_model_dir, made.engine.config, head_dir_of("medusa"))
    made.engine.replace_target(successor)
    assert made.finish().tokens == plain.tokens


def test_no_step_runs_ahead_with_a_grammar(tiny_model_dir, head_dir_of):
    compiler = grammar_compiler(tiny_model_dir)
    spec = StructuredOutput(regex="[a-z]{8,20}")
    constrained = request("a", prompt(0), structured_output=spec, max_tokens=40)
    made = Run.with_head(tiny_model_dir, head_dir_of("medusa"), async_scheduling=True)
    for each in (replace(constrained, grammar=compiler.compile(spec)), request("b", prompt(1))):
        made.engine.add(each)
    made.step()
    while made.engine.stats().num_running == 2:
        made.step()
        assert made.target.num_ahead == 0


def test_no_step_runs_ahead_of_a_lookup_before_the_head(tiny_model_dir, head_dir_of, plain):
    lookups = {"first": "ngram", "prompt_lookup_min": 1}
    made = Run.with_head(
        tiny_model_dir, head_dir_of("medusa"), async_scheduling=True, speculation=lookups
    )
    outcome = made.finish(requests())
    assert outcome.tokens == plain.tokens
    assert outcome.target.num_held == 0


@pytest.mark.parametrize("holds", [False, True])
def test_confidences_divide_the_budget_of_every_step(tiny_model_dir, head_dir_of, plain, holds):
    """They arrive with the drafts, so that no step is begun ahead; without them it is."""
    keys = {"batch_budget": not holds}
    made = Run.with_head(
        tiny_model_dir, head_dir_of("medusa"), async_scheduling=True, speculation=keys
    )
    outcome = made.finish(requests())
    assert outcome.tokens == plain.tokens
    assert (outcome.target.num_held > 0) == holds


@pytest.mark.parametrize("is_async", [False, True])
def test_predicted_output_keeps_the_tokens_of_a_head(tiny_model_dir, head_dir_of, plain, is_async):
    """Sequences with a prediction draft it; the drafts of the others are held by the rank."""
    predicted = {"greedy", "drawn", "stops", "logprobs"}
    run = Run.with_head(
        tiny_model_dir,
        head_dir_of("eagle3"),
        "eagle3",
        KERNELS[-1],
        async_scheduling=is_async,
        max_num_batched_tokens=128,
    )
    given = []
    for each in requests():
        tokens = plain.tokens[each.request_id, 0][0]
        edited = [token if place % 6 else token + 1 for place, token in enumerate(tokens)]
        prediction = PredictedText(edited) if each.request_id in predicted else None
        given.append(replace(each, prediction=prediction))
    found = run.finish(given)
    assert found.tokens == plain.tokens
    assert found.counts.drafted_by_method.keys() == {"prediction", "eagle3"}
    assert found.counts.accepted_by_method["prediction"][0] > 0
