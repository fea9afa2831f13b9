# Modules: specdec.engine.committer, specdec.engine.step_results
# Modules: specdec.engine.requests.open_requests
"""The engine on a target without a model: exact tokens and counts, no lost blocks."""

from dataclasses import replace

import pytest

from specdec.models.config.model_config import ModelConfig
from specdec.speculation.proposers.cascade import CascadeProposer, Stage
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    engine_config,
    make_engine,
    request,
    run,
)

VOCAB_SIZE = 383
PROMPT = [11, 12, 13, 14, 11, 12]


@pytest.fixture
def target() -> HashTarget:
    return HashTarget(block_size=4, vocab_size=VOCAB_SIZE)


def perfect(target):
    """Return a proposer that knows the target's continuation."""
    return ScriptedProposer(target.continuation)


def wrong_from(target, num_right):
    """Return a proposer whose drafts are right for `num_right` tokens and wrong after them."""

    def drafts(tokens, count):
        truth = target.continuation(tokens, count)
        return [token if i < num_right else token + 1 for i, token in enumerate(truth)]

    return ScriptedProposer(drafts)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 7])
def test_batched_sequences_generate_the_same_tokens_as_alone(
    tiny_model_dir, target, num_draft_tokens
):
    engine = make_engine(tiny_model_dir, engine_config(num_draft_tokens), target)
    prompts = {f"r{i}": [10 + (i + j) % 5 for j in range(3 + 7 * i)] for i in range(12)}
    generated = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert generated[name].token_ids == target.continuation(prompt, 24)
    speculation = engine.stats().counts.speculation
    assert (speculation.num_accepted_tokens > 0) == (num_draft_tokens > 0)


def test_preemption_changes_nothing(tiny_model_dir, target):
    config = engine_config(3, num_blocks=40)  # one sequence of max_model_len, or four of ours
    engine = make_engine(tiny_model_dir, config, target)
    prompts = {f"r{i}": [10 + (i * j) % 5 for j in range(30)] for i in range(8)}
    generated = run(
        engine, [request(name, prompt, max_tokens=40) for name, prompt in prompts.items()]
    )
    for name, prompt in prompts.items():
        assert generated[name].token_ids == target.continuation(prompt, 40)
    assert engine.stats().counts.num_preemptions > 0
    assert engine.stats().num_free_blocks == 40


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_counts_of_a_hand_worked_case(tiny_model_dir, target, num_right):
    engine = make_engine(tiny_model_dir, engine_config(3), target, wrong_from(target, num_right))
    engine.add(request("r", PROMPT, max_tokens=100))
    outputs = [output for _ in range(7) for output in engine.step()]
    # The first step returns nothing; the prompt yields 1 token, each of 5 drafts num_right + 1.
    assert [len(output.token_ids) for output in outputs] == [1] + [num_right + 1] * 5
    assert [sum(output.is_drafted) for output in outputs] == [0] + [num_right] * 5
    assert engine.stats().counts.speculation == SpeculationStats(5, 15, 5 * num_right)
    assert outputs[-1].speculation == SpeculationStats(5, 15, 5 * num_right)
    assert engine.stats().counts.accepted_by_position == tuple(
        5 * (i < num_right) for i in range(3)
    )
    assert engine.stats().counts.num_generated_tokens == 6 + 5 * num_right
    generated = [token for output in outputs for token in output.token_ids]
    assert generated == target.continuation(PROMPT, len(generated))


def test_drafts_are_counted_by_drafting_method(tiny_model_dir, target):
    """The lookup drafts in the first step of each sequence, the draft model in the others."""
    ngram = ScriptedProposer(
        lambda tokens, count: target.continuation(tokens, count * is_new(tokens))
    )
    model = ScriptedProposer(
        lambda tokens, count: [t + 1 for t in target.continuation(tokens, count)]
    )

    def is_new(tokens):
        return len(tokens) == len(PROMPT) + 1

    of_model = Stage("draft_model", model, is_model=True)
    proposer = CascadeProposer([Stage("ngram", ngram), of_model])
    engine = make_engine(tiny_model_dir, engine_config(3), target, proposer)
    run(engine, [request("r", PROMPT, max_tokens=8)])
    # One token from the prompt, 4 from a right draft, then 1 from each wrong draft of 2 and 1.
    stats = engine.stats()
    assert stats.counts.drafted_by_method == {"ngram": (1, 1, 1), "draft_model": (2, 1)}
    assert stats.counts.accepted_by_method == {"ngram": (1, 1, 1), "draft_model": (0, 0)}
    assert stats.counts.speculation == SpeculationStats(3, 6, 3)


def test_newly_scheduled_lists_each_request_in_its_first_step(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3, max_num_seqs=2), target)
    for name in ("a", "b"):
        engine.add(request(name, PROMPT, max_tokens=2))
    engine.add(request("c", PROMPT, max_tokens=2, n=2))
    begun = []
    while engine.has_work:
        engine.step()
        begun.append(engine.newly_scheduled)
    assert begun[0] == ("a", "b")
    assert [name for names in begun for name in names] == ["a", "b", "c"], "once each"


def test_draft_length_is_bounded_by_max_tokens(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target, wrong_from(target, 0))
    run(engine, [request("r", PROMPT, max_tokens=6)])
    assert [row.num_draft_tokens for step in target.steps for row in step.rows] == [
        0,
        3,
        3,
        2,
        1,
        0,
    ]


def test_a_stale_draft_is_never_verified(tiny_model_dir, target):
    proposer = ScriptedProposer(target.continuation, base_shift=-1)
    engine = make_engine(tiny_model_dir, engine_config(3), target, proposer)
    generated = run(engine, [request("r", PROMPT)])["r"]
    assert generated.token_ids == target.continuation(PROMPT, 24)
    assert proposer.num_calls > 0
    assert engine.stats().counts.speculation.num_draft_tokens == 0
    assert all(row.num_draft_tokens == 0 for step in target.steps for row in step.rows)


def test_a_disabled_request_gets_no_proposer_call_and_no_draft_slot(tiny_model_dir, target):
    proposer = perfect(target)
    engine = make_engine(tiny_model_dir, engine_config(7), target, proposer)
    off = SpeculationOptions(enabled=False)
    engine.add(request("r", PROMPT, speculation=off, max_tokens=30))
    num_tokens = len(PROMPT)
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
        held = 200 - engine.stats().num_free_blocks
        assert held <= -(-num_tokens // 4), "slots beyond the next token"
    assert proposer.num_calls == 0


def test_a_request_may_lower_its_draft_length(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(7), target, perfect(target))
    run(engine, [request("r", PROMPT, speculation=SpeculationOptions(num_speculative_tokens=2))])
    assert max(row.num_draft_tokens for step in target.steps for row in step.rows) == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_ends_short_outputs(tiny_model_dir, target, max_tokens):
    engine = make_engine(tiny_model_dir, engine_config(7), target, perfect(target))
    generated = run(engine, [request("r", PROMPT, max_tokens=max_tokens)])["r"]
    assert generated.token_ids == target.continuation(PROMPT, max_tokens)
    assert generated.finish_reason is FinishReason.LENGTH


def test_the_context_length_ends_a_sequence(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(7), target, perfect(target))
    generated = run(engine, [request("r", [11] * 100, max_tokens=None)])["r"]
    assert len(generated.token_ids) == 60
    assert generated.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_draft_tokens", [0, 7])
def test_a_stop_string_cuts_text_and_draft_tokens_after_it(
    tiny_model_dir, target, num_draft_tokens
):
    tokenizer = Tokenizer(tiny_model_dir)
    truth = target.continuation(PROMPT, 24)
    stop = tokenizer.decode(truth[4:7])
    engine = make_engine(tiny_model_dir, engine_config(num_draft_tokens), target, perfect(target))
    generated = run(engine, [request("r", PROMPT, stop=(stop,))])["r"]
    whole = tokenizer.decode(truth)
    assert generated.finish_reason is FinishReason.STOP
    assert generated.text == whole[: whole.index(stop)]
    assert generated.token_ids == truth[: len(generated.token_ids)]
    assert stop in tokenizer.decode(generated.token_ids)
    assert stop not in tokenizer.decode(generated.token_ids[:-1])


@pytest.mark.parametrize("num_draft_tokens", [0, 7])
def test_an_eos_token_ends_a_sequence_unless_ignored(tiny_model_dir, target, num_draft_tokens):
    class EndsAtTen(HashTarget):
        def next_token(self, context):
            return 2 if len(context) == 10 else super().next_token(context)

    engine = make_engine(
        tiny_model_dir, engine_config(num_draft_tokens), ending := EndsAtTen(4, VOCAB_SIZE)
    )
    assert 2 in ModelConfig.from_directory(tiny_model_dir).eos_token_ids
    generated = run(engine, [request("a", PROMPT, ignore_eos=False), request("b", PROMPT)])
    assert generated["a"].token_ids == [*ending.continuation(PROMPT, 4), 2]
    assert generated["a"].finish_reason is FinishReason.STOP
    assert len(generated["b"].token_ids) == 24


def test_abort_frees_blocks_within_one_step(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    engine.add(request("a", PROMPT, max_tokens=100))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    assert engine.stats().num_free_blocks == 200
    assert not engine.step()
    assert not engine.has_work
    engine.abort("a")  # an ended or unknown request is ignored


def test_prefill_is_chunked_and_does_not_delay_decoding(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(max_num_batched_tokens=16), target)
    engine.add(request("short", PROMPT, max_tokens=100))
    engine.step()
    engine.add(request("long", [11] * 100))
    for _ in range(7):
        assert [output.request_id for output in engine.step()] == ["short"]
    assert all(sum(len(row.token_ids) for row in step.rows) <= 16 for step in target.steps)
    assert {output.request_id for output in engine.step()} == {"short", "long"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [11] * 160}, "prompt length is 160; it must be at most 159"),
        ({"prompt": [11, 383]}, r"prompt\[1\] is 383; it must be a token id from 0 to 382"),
        ({"prompt": [-1]}, r"prompt\[0\] is -1"),
        ({"prompt": [11] * 100, "max_tokens": 61}, "max_tokens is 61; it must be at most 60"),
    ],
)
def test_an_invalid_request_is_rejected_without_a_trace(tiny_model_dir, target, changes, message):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    with pytest.raises(InvalidValueError, match=message):
        engine.add(request("r", **{"prompt": PROMPT, **changes}))
    assert not engine.has_work
    assert len(run(engine, [request("r", PROMPT)])["r"].token_ids) == 24


def test_a_method_that_is_not_loaded_is_refused(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(0), target)
    ngram = SpeculationOptions(method="ngram")
    with pytest.raises(InvalidValueError, match=r"speculation\.method is 'ngram'; .* none"):
        engine.add(request("r", PROMPT, speculation=ngram))


def test_an_id_in_use_is_refused(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(), target)
    engine.add(request("r", PROMPT))
    with pytest.raises(InvalidValueError, match="request_id"):
        engine.add(request("r", PROMPT))


def test_batch_and_queue_bound_the_number_of_requests(tiny_model_dir, target):
    config = engine_config(max_num_seqs=2, max_queue_len=1)
    engine = make_engine(tiny_model_dir, config, target)
    for name in "abc":
        engine.add(request(name, PROMPT))
    with pytest.raises(OverloadedError, match="3 requests run or wait"):
        config.require_room(engine.stats().num_running + engine.stats().num_waiting, 1)
    with pytest.raises(OverloadedError, match="requests run or wait"):
        engine.add(request("d", PROMPT))
    engine.abort("a")
    engine.add(request("d", PROMPT))


def test_a_shared_prefix_is_computed_once(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    system = [10 + i % 5 for i in range(40)]
    prompts = {"a": [*system, 10, 11], "b": [*system, 12, 13], "c": [*system, 14]}
    for name, prompt in prompts.items():
        generated = run(engine, [request(name, prompt)])[name]
        assert generated.token_ids == target.continuation(prompt, 24)
    assert engine.stats().counts.num_cached_tokens == 80
    rows = [row for step in target.steps for row in step.rows]
    assert sum(row.num_computed_tokens == 0 for row in rows) == 1


def test_generated_tokens_are_a_cached_prefix_of_the_next_turn(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    first = run(engine, [request("a", PROMPT)])["a"]
    history = [*PROMPT, *first.token_ids, 12]
    run(engine, [request("b", history)])
    # The last token's KV was never computed, and only whole blocks of 4 are kept.
    assert engine.stats().counts.num_cached_tokens == (len(history) - 2) // 4 * 4


def test_without_prefix_caching_no_prefix_is_reused(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3, enable_prefix_caching=False), target)
    for name in "ab":
        generated = run(engine, [request(name, PROMPT * 4)])[name]
        assert generated.token_ids == target.continuation(PROMPT * 4, 24)
    assert engine.stats().counts.num_cached_tokens == 0


def test_lower_priority_numbers_go_first(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(max_num_seqs=1), target)
    ended = []
    for name, priority in {"late": 5, "normal": 0, "urgent": -5, "also normal": 0}.items():
        engine.add(replace(request(name, PROMPT, max_tokens=2), priority=priority))
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["urgent", "normal", "also normal", "late"]


def test_the_request_of_lowest_priority_is_preempted(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(num_blocks=40), target)
    for name, priority in {"first": 1, "second": 0}.items():
        engine.add(replace(request(name, [11] * 60, max_tokens=60), priority=priority))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["second", "first"]
    assert engine.stats().counts.num_preemptions > 0


def test_only_requests_that_never_ran_expire(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(max_num_seqs=1), target)
    for name in ("running", "waiting", "patient"):
        engine.add(replace(request(name, PROMPT), queue_deadline_s=10.0))
        engine.step()
    engine.add(replace(request("new", PROMPT), queue_deadline_s=20.0))
    assert engine.expire(9.9) == []
    assert engine.expire(10.0) == ["waiting", "patient"]
    assert engine.stats().num_waiting == 1
    engine.check_integrity()


def prefilled(step):
    return sum(len(row.token_ids) for row in step.rows if len(row.token_ids) > 1)


@pytest.mark.parametrize("limit", [None, 5, 200])
def test_prefill_is_limited_in_steps_with_decoding_sequences(tiny_model_dir, target, limit):
    engine = make_engine(tiny_model_dir, engine_config(max_prefill_tokens=limit), target)
    prompts = {"short": PROMPT, "long": [11 + i % 4 for i in range(90)]}
    generated = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert generated[name].token_ids == target.continuation(prompt, 24)
    # The first step has all of the short prompt and 58 tokens of the long one; none decodes.
    assert prefilled(target.steps[0]) == 64
    assert max(map(prefilled, target.steps[1:])) == min(limit or 32, 32)


def test_prefill_fills_a_step_without_decoding_sequences(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(max_prefill_tokens=5), target)
    run(engine, [request("long", [11 + i % 4 for i in range(90)])])
    assert [prefilled(step) for step in target.steps[:2]] == [64, 26]


def test_newly_scheduled_reports_each_request_once(tiny_model_dir, target):
    """Once also for a preempted request and for one with several choices."""
    engine = make_engine(tiny_model_dir, engine_config(max_num_seqs=2), target)
    for each in (request("a", PROMPT), request("b", PROMPT, n=2), request("c", PROMPT)):
        engine.add(each)
    engine.step()
    scheduled = [engine.newly_scheduled]
    engine.replace_target(HashTarget(block_size=4, vocab_size=VOCAB_SIZE))
    while engine.has_work:
        engine.step()
        scheduled.append(engine.newly_scheduled)
    assert scheduled[0] == ("a", "b")
    assert [name for names in scheduled for name in names] == ["a", "b", "c"]
