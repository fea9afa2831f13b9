"""Several choices of one request: their tokens, shared prompts and ends."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.messages import VerifiedRow
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engines import (
    HashTarget,
    Transcript,
    engine_config,
    local_engine,
    make_engine,
    request,
)

PROMPT = [11, 12, 13, 14, 11, 12]
STOP_TOKEN = 7
LONG_PROMPT = [10 + i % 5 for i in range(40)]


@pytest.fixture
def target():
    return HashTarget(block_size=4, vocab_size=383)


def run_choices(engine, *requests):
    """Transcripts of each choice, by request id and index; integrity is checked after each step."""
    generated = {
        (each.request_id, i): Transcript() for each in requests for i in range(each.params.n)
    }
    for each in requests:
        engine.add(each)
    ended = []
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in ended, "an output after the last"
            generated[output.request_id, output.choice].add(output)
            ended += [output.request_id] * output.is_last
        engine.check_integrity()
    assert sorted(ended) == sorted(each.request_id for each in requests)
    return generated


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_tokens_of_a_choice_do_not_depend_on_n(tiny_model_dir, num_draft_tokens):
    def generated(n, k):
        engine = local_engine(tiny_model_dir, engine_config(k))
        found = run_choices(engine, request("r", LONG_PROMPT, temperature=1.0, seed=3, n=n))
        return [found["r", i].token_ids for i in range(n)]

    expected = generated(4, 0)
    assert len(set(map(tuple, expected))) == 4, "choices with the same noise"
    for n in (1, 2, 4):
        assert generated(n, num_draft_tokens) == expected[:n]


def test_the_prompt_is_computed_once_for_all_choices(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3, max_num_batched_tokens=16), target)
    generated = run_choices(engine, request("r", LONG_PROMPT, n=4))
    for i in range(4):
        assert generated["r", i].token_ids == target.continuation(LONG_PROMPT, 24)
    assert (
        engine.stats().counts.num_cached_tokens == 3 * 36
    )  # whole blocks, short of the last token
    rows = [row for step in target.steps for row in step.rows]
    assert sum(row.num_computed_tokens == 0 for row in rows) == 1
    assert engine.stats().counts.num_prompt_tokens == 4 * 40


def test_choices_that_wait_for_the_prompt_do_not_block_other_requests(tiny_model_dir, target):
    config = engine_config(max_num_batched_tokens=24, max_num_seqs=3)
    engine = make_engine(tiny_model_dir, config, target)
    engine.add(request("many", [11] * 100, n=3))
    engine.add(request("other", PROMPT))
    while engine.has_work:
        engine.step()
    begun = [row.seq_id for step in target.steps for row in step.rows]
    assert list(dict.fromkeys(begun)) == [0, 3, 1, 2], "the other request waited for the choices"


def test_without_a_prefix_cache_choices_begin_at_once(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(enable_prefix_caching=False), target)
    generated = run_choices(engine, request("r", PROMPT, n=3))
    assert all(each.token_ids == target.continuation(PROMPT, 24) for each in generated.values())
    assert len(target.steps[0].rows) == 3


def test_more_choices_than_max_num_seqs_run_in_turn(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3, max_num_seqs=2), target)
    generated = run_choices(engine, request("a", PROMPT, n=5), request("b", LONG_PROMPT, n=2))
    assert all(len(each.token_ids) == 24 for each in generated.values())
    assert max(len(step.rows) for step in target.steps) == 2


def test_counts_include_all_choices(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    generated = run_choices(engine, request("r", PROMPT, n=3, max_tokens=10))
    [last] = [each.last for each in generated.values() if each.last.is_last]
    assert (last.num_prompt_tokens, last.num_output_tokens) == (6, 30)
    assert last.speculation == engine.stats().counts.speculation
    assert last.speculation.num_accepted_tokens > 0


def test_preemption_of_choices_changes_nothing(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3, num_blocks=40), target)
    requests = [request(name, [*LONG_PROMPT, i], n=4, max_tokens=40) for i, name in enumerate("ab")]
    generated = run_choices(engine, *requests)
    for each in requests:
        for i in range(4):
            expected = target.continuation(each.prompt_token_ids, 40)
            assert generated[each.request_id, i].token_ids == expected
    assert engine.stats().counts.num_preemptions > 0
    assert engine.stats().num_free_blocks == 40


def test_replacing_the_target_loses_no_choice(tiny_model_dir):
    for num_steps in (1, 2, 5):
        target = HashTarget(block_size=4, vocab_size=383)
        engine = make_engine(tiny_model_dir, engine_config(3, max_num_batched_tokens=16), target)
        generated = [Transcript() for _ in range(3)]
        engine.add(request("r", LONG_PROMPT, n=3))
        while engine.has_work:
            if engine.stats().counts.num_steps == num_steps:
                engine.replace_target(HashTarget(block_size=4, vocab_size=383))
            for output in engine.step():
                generated[output.choice].add(output)
        assert [each.token_ids for each in generated] == [target.continuation(LONG_PROMPT, 24)] * 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_abort_ends_all_choices_within_one_step(tiny_model_dir, target, num_steps):
    engine = make_engine(tiny_model_dir, engine_config(3, max_num_batched_tokens=16), target)
    engine.add(request("r", LONG_PROMPT, n=4, max_tokens=100))
    for _ in range(num_steps):
        engine.step()
    engine.abort("r")
    assert engine.stats().num_free_blocks == 200
    assert not engine.step()
    assert not engine.has_work


def test_choices_do_not_wait_for_an_ended_leader(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    generated = run_choices(engine, request("r", PROMPT, n=3, max_tokens=1))
    assert [each.finish_reason for each in generated.values()] == [FinishReason.LENGTH] * 3


def test_a_scheduled_request_does_not_expire(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(max_num_seqs=1), target)
    engine.add(replace(request("begun", PROMPT, n=3), queue_deadline_s=10.0))
    engine.step()
    engine.add(replace(request("waiting", PROMPT, n=2), queue_deadline_s=10.0))
    assert engine.expire(11.0) == ["waiting"]
    assert engine.stats().num_waiting == 2


def test_each_choice_counts_towards_the_queue_limit(tiny_model_dir, target):
    config = engine_config(max_num_seqs=2, max_queue_len=2)
    engine = make_engine(tiny_model_dir, config, target)
    with pytest.raises(InvalidValueError, match=r"n is 5; it must be at most 4 \(max_num_seqs"):
        config.require_room(0, 5)
    engine.add(request("a", PROMPT, n=2))
    with pytest.raises(OverloadedError, match=r"2 of 4 requests run or wait.*; this one has 3"):
        config.require_room(engine.stats().num_waiting, 3)
    with pytest.raises(OverloadedError, match="requests run or wait"):
        engine.add(request("too many", PROMPT, n=3))
    engine.add(request("b", PROMPT, n=2))
    assert (engine.stats().num_waiting, engine.stats().num_running) == (4, 0)


def test_several_choices_cannot_be_resumed(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(), target)
    with pytest.raises(InvalidValueError, match="n is 2; it must be 1 where resume_token_ids"):
        engine.add(replace(request("r", PROMPT, n=2), resume_token_ids=(11,)))
    assert not engine.has_work


def test_only_the_first_choice_reports_prompt_logprobs(tiny_model_dir, target):
    engine = make_engine(tiny_model_dir, engine_config(), target)
    run_choices(engine, request("r", PROMPT, n=3, prompt_logprobs=2, max_tokens=2))
    admissions = [each for step in target.steps for each in step.admitted]
    assert [each.rules.prompt_logprobs for each in admissions] == [2, None, None]
    assert [each.rules.choice for each in admissions] == [0, 1, 2]


@pytest.mark.parametrize(
    "ending", [VerifiedRow(1, (STOP_TOKEN,)), VerifiedRow(1, (), has_bad_logits=True)]
)
def test_the_first_output_belongs_to_the_first_choice(tiny_model_dir, ending):
    """It carries the log-probabilities of the prompt, and later failures do not change it."""

    class Target(HashTarget):
        def collect(self):
            output = super().collect()
            rows = (ending if row.seq_id == ending.seq_id else row for row in output.rows)
            return replace(output, rows=tuple(rows))

    target = Target(block_size=4, vocab_size=383)
    engine = make_engine(tiny_model_dir, engine_config(enable_prefix_caching=False), target)
    engine.add(request("r", PROMPT, n=2, stop_token_ids=(STOP_TOKEN,)))
    outputs = []
    while not outputs:
        outputs = engine.step()
    first, second = outputs
    assert (first.choice, len(first.token_ids), first.error) == (0, 1, None)
    assert second.choice == 1
    assert second.error is not None or second.finish_reason is FinishReason.STOP


def test_texts_are_tokenized_once_for_all_choices(tiny_model_dir, target, monkeypatch):
    encode = Mock(wraps=Tokenizer(tiny_model_dir).encode)
    decode = Mock(wraps=Tokenizer(tiny_model_dir).decode)
    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "decode", decode)
    engine = make_engine(tiny_model_dir, engine_config(), target)
    options = SpeculationOptions(verifier="threshold")
    engine.add(request("r", PROMPT, n=4, bad_words=("the", "river"), speculation=options))
    assert encode.call_count == 4, "two spellings of each word"
    assert decode.call_count == 1, "what the acceptance threshold goes by"


def test_prompt_logprobs_must_fit_into_one_message(tiny_model_dir, target, monkeypatch):
    monkeypatch.setattr("specdec.engine.requests.input_processor.MAX_PROMPT_LOGPROBS", 30)
    engine = make_engine(tiny_model_dir, engine_config(), target)
    engine.add(request("fits", PROMPT, prompt_logprobs=4))
    with pytest.raises(InvalidValueError, match=r"prompt_logprobs is 5; .* 6 tokens .* at most 30"):
        engine.add(request("does not", PROMPT, prompt_logprobs=5))
