"""Asynchronous scheduling of steps with drafts: the tokens and drafts of synchronous scheduling."""

from collections import defaultdict

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.proposers import make_proposer
from tests.specdec.engine.scheduling.test_async_scheduling import (
    PROMPTS,
    answers,
    engine_on,
    repetitive_requests,
    step,
    varied_requests,
)
from tests.specdec.engines import (
    Transcript,
    draft_model,
    engine_config,
    request,
    run,
)
from tests.specdec.fakes import run_ranks

METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "draft_model": {"method": "draft_model"},
    "ngram first": {"method": "draft_model", "first": "ngram"},
}


SHORT_BLOCKS = {"max_prefill_tokens": 5, "num_blocks": 60}


def methods_and_changes():
    """Yield all pairs; make test has each method with one of the changes, two with both."""
    for place, method in enumerate(METHODS):
        for changes in ({}, SHORT_BLOCKS):
            is_quick = method in ("ngram", "draft_model") or bool(changes) == place % 2
            yield pytest.param(method, changes, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("method", "changes"), list(methods_and_changes()), ids=str)
def test_drafts_are_those_of_synchronous_scheduling(tiny_model_dir, method, changes):
    """Where blocks are short a sequence may join one step later, and with others' drafts."""
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, **METHODS[method])
    outcomes = {}
    for is_async in (False, True):
        drafter = draft_model(tiny_model_dir) if "draft_model" in speculation.methods else None
        config = engine_config(speculation=speculation, async_scheduling=is_async, **changes)
        proposer = make_proposer(speculation, drafter)
        engine, target = engine_on(tiny_model_dir, config, proposer=proposer)
        generated = answers(engine, varied_requests() + repetitive_requests())
        generated |= answers(engine, [request("long", list(range(5, 105)), max_tokens=9)])
        drafted = engine.stats().counts.drafted_by_method
        assert sum(map(sum, drafted.values())) > 50
        outcomes[is_async] = generated, None if "num_blocks" in changes else drafted
        assert (target.num_ahead > 0) == is_async
    assert outcomes[True] == outcomes[False]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafts_of_lookups_are_sent_ahead_for_each_token(tiny_model_dir, num_ranks):
    """Every rank selects the draft after the token that it has sampled."""

    def of_rank(is_async):
        def outcome(group):
            speculation = SpeculativeConfig.of("ngram", prompt_lookup_min=2)
            config = engine_config(speculation=speculation, async_scheduling=is_async)
            engine, target = engine_on(tiny_model_dir, config, group)
            few_kinds = request("few", PROMPTS[0], allowed_token_ids=(40, 41, 42), max_tokens=60)
            generated = answers(engine, [*repetitive_requests(), few_kinds])
            ahead = [row for step, is_ahead in target.steps if is_ahead for row in step.rows]
            assert any(row.drafting.by_token for row in ahead) == is_async
            return generated, engine.stats().counts.speculation, len(target.steps)

        return outcome

    plain = run_ranks(num_ranks, of_rank(is_async=False))
    assert run_ranks(num_ranks, of_rank(is_async=True)) == plain
    assert plain[0][1].num_accepted_tokens > 5


def test_a_step_with_drafts_is_followed_by_one_that_waits_for_it(tiny_model_dir):
    speculation = SpeculativeConfig.of("ngram", prompt_lookup_min=1)
    config = engine_config(speculation=speculation, async_scheduling=True)
    engine, target = engine_on(tiny_model_dir, config)
    transcripts = defaultdict(Transcript)
    for each in repetitive_requests():
        engine.add(each)
    num_drafted = 0
    while engine.has_work:
        has_drafts = any(row.guesses for _, row in (engine._steps.rows if engine._steps else ()))
        num_begun = len(target.steps)
        step(engine, transcripts)
        if has_drafts:
            num_drafted += 1
            assert not any(is_ahead for _, is_ahead in target.steps[num_begun:])
    assert num_drafted > 0


def test_no_step_runs_ahead_of_drafts_that_depend_on_it(tiny_model_dir):
    """Only after the last token but one, where none is of use."""
    config = engine_config(speculation=SpeculativeConfig.of("suffix"), async_scheduling=True)
    engine, target = engine_on(tiny_model_dir, config)
    run(engine, [request("a", PROMPTS[2])])
    assert [is_ahead for _, is_ahead in target.steps].count(True) == 1
    assert target.steps[-1][1]


def test_a_request_that_joins_ahead_drafts_at_once_where_seats_are_free(tiny_model_dir):
    speculation = SpeculativeConfig.of("draft_model", 4)
    config = engine_config(speculation=speculation, async_scheduling=True)
    drafter = draft_model(tiny_model_dir, max_catch_up_tokens=64)
    engine, target = engine_on(tiny_model_dir, config, proposer=drafter)
    prompts = {"long": list(range(5, 105)), "joins": list(range(150, 170))}
    run(engine, [request(name, each, max_tokens=11) for name, each in prompts.items()])
    assert [is_ahead for step, is_ahead in target.steps if step.admitted] == [False, True]
    lengths = [[len(row.token_ids) for row in step.rows] for step, _ in target.steps]
    assert lengths == [[64], [36, 20], [5, 5], [5, 5]]
