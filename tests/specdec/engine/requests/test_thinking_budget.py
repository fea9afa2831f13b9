"""Thinking budgets: on a target that writes a given text, and against requests in two parts."""

from dataclasses import replace

import pytest

from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.errors import InvalidValueError
from specdec.types.request import ThinkingBudget
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import (
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from tests.specdec.engines import (
    HashTarget,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.grammars import grammar_compiler

PROMPT = (1, 2, 3, 4, 5)
OPENING, MARK = "<think>", "</think>"
REASONED = f"So é st 冬 sto{MARK}"
ANSWER = " Yé st 冬🥖 sto ok"
CLOSING_IDS = (10, 11, 12, 13, 14)


def begins_inside(text):
    return MARK not in text


def begins_with_mark(text):
    has_begun = text.startswith(OPENING) or OPENING.startswith(text)
    return has_begun and begins_inside(text)


class WritingTarget(HashTarget):
    """Writes the tokens of a text after the prompt, then token 0."""

    def __init__(self, token_ids):
        super().__init__(4, 512)
        self._token_ids = token_ids

    def next_token(self, context):
        place = len(context) - len(PROMPT)
        return self._token_ids[place] if place < len(self._token_ids) else 0


@pytest.fixture
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


def encode(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def outputs_of(directory, written, num_tokens, is_open=begins_inside, **params):
    """Return the outputs of a request with a budget whose target writes `written`."""
    engine = make_engine(directory, engine_config(0), WritingTarget(written))
    closing_ids = encode(engine.tokenizer, f"\n{MARK}\n\n")
    values = {"temperature": 0.0, "max_tokens": len(written), "ignore_eos": True, **params}
    sampling = SamplingParams(**values)
    spec = sampling.structured_output
    grammar = None if spec is None else grammar_compiler(directory).compile(spec)
    budget = ThinkingBudget(num_tokens, closing_ids, is_open)
    engine.add(EngineRequest(PROMPT, sampling, seed=0, grammar=grammar, thinking_budget=budget))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def tokens_and_text(outputs):
    assert [each.is_last for each in outputs] == [False] * (len(outputs) - 1) + [True]
    token_ids = [token for each in outputs for token in each.token_ids]
    assert outputs[-1].num_output_tokens == len(token_ids)
    assert all(len(each.token_ids) == len(each.text_lengths) for each in outputs)
    return token_ids, "".join(each.text for each in outputs)


def test_reasoning_that_has_ended_is_not_cut(tiny_model_dir, tokenizer):
    """The budget may end within a character, or in the start of a stop string."""
    written = encode(tokenizer, REASONED + ANSWER)
    first = len(encode(tokenizer, REASONED))
    for num_tokens in range(first + 1, len(written) + 1):
        outputs = outputs_of(tiny_model_dir, written, num_tokens, stop=("stop", "ok then"))
        assert tokens_and_text(outputs) == (list(written), REASONED + ANSWER), num_tokens


def test_open_reasoning_is_ended_with_all_of_its_text(tiny_model_dir, tokenizer):
    """The text withheld at the cut is sent once, before or after the mark that is appended."""
    written = encode(tokenizer, REASONED + ANSWER)
    end = len(encode(tokenizer, REASONED[: -len(MARK)])) - 1
    for num_tokens in range(1, end):
        outputs = outputs_of(tiny_model_dir, written, num_tokens, stop=("stop", f"{MARK}\n\nstop"))
        token_ids, text = tokens_and_text(outputs)
        assert token_ids[:num_tokens] == list(written[:num_tokens])
        assert text == tokenizer.decode(token_ids), num_tokens
        assert MARK in text


def test_an_answer_without_room_ends_with_all_of_its_text(tiny_model_dir, tokenizer):
    written = encode(tokenizer, "So é st")
    outputs = outputs_of(tiny_model_dir, written, len(written) - 1, stop=("stop",))
    token_ids, text = tokens_and_text(outputs)
    assert token_ids == list(written[:-1])
    assert text == tokenizer.decode(token_ids)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_may_be_the_mark(tiny_model_dir, tokenizer):
    written = encode(tokenizer, REASONED + ANSWER)
    outputs = outputs_of(tiny_model_dir, written, 4, stop=(MARK,))
    _, text = tokens_and_text(outputs)
    assert text == tokenizer.decode(written[:4]) + "\n"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, MARK)


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_may_be_in_the_mark(tiny_model_dir, tokenizer, place, is_included):
    written = encode(tokenizer, REASONED + ANSWER)
    closing = encode(tokenizer, f"\n{MARK}\n\n")
    params = {"stop_token_ids": (closing[place],), "include_stop_str_in_output": is_included}
    outputs = outputs_of(tiny_model_dir, written, 4, **params)
    token_ids, text = tokens_and_text(outputs)
    forced = closing[: closing.index(closing[place]) + 1]
    assert token_ids == [*written[:4], *forced]
    assert text == tokenizer.decode(token_ids if is_included else token_ids[:-1])
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == closing[place]


@pytest.mark.parametrize("place", [0, 3, -1])
def test_no_stop_token_of_the_mark_ends_an_answer_before_min_tokens(
    tiny_model_dir, tokenizer, place
):
    written = encode(tokenizer, REASONED + ANSWER)
    closing = encode(tokenizer, f"\n{MARK}\n\n")
    before = 4 + closing.index(closing[place])
    for min_tokens, is_ended in ((before, True), (before + 1, False)):
        params = {"stop_token_ids": (closing[place],), "min_tokens": min_tokens}
        token_ids, _ = tokens_and_text(outputs_of(tiny_model_dir, written, 4, **params))
        if is_ended:
            assert token_ids[4:] == list(closing[: before - 3])
        else:
            assert token_ids[:min_tokens] == list(written[:min_tokens])


def test_reasoning_goes_on_where_a_grammar_permits_no_mark(tiny_model_dir, tokenizer):
    """As in a call that began in the reasoning: its grammar goes on in the answer."""
    written = encode(tokenizer, REASONED + ANSWER)
    for regex, is_ended in ((r"So [^<]*", False), (r"(.|\n)*", True)):
        limits = {"max_tokens": 20, "structured_output": StructuredOutput(regex=regex)}
        outputs = outputs_of(tiny_model_dir, written, 5, **limits)
        token_ids, text = tokens_and_text(outputs)
        assert token_ids[:5] == list(written[:5])
        assert text == tokenizer.decode(token_ids)
        assert (MARK in text) == is_ended
        assert [each.num_output_tokens for each in outputs] == sorted(
            each.num_output_tokens for each in outputs
        )
        assert outputs[-1].num_output_tokens == len(token_ids)


@pytest.mark.parametrize("num_tokens", [154, 155, 400])
def test_an_answer_without_max_tokens_ends_with_the_context(tiny_model_dir, tokenizer, num_tokens):
    """The budget may be larger than what the prompt leaves of the context."""
    room = engine_config(0).max_model_len - len(PROMPT)
    written = (encode(tokenizer, "So é st ") * room)[:room]
    outputs = outputs_of(tiny_model_dir, written, num_tokens, max_tokens=None)
    token_ids, text = tokens_and_text(outputs)
    assert token_ids == list(written[: min(num_tokens, room)])
    assert text == tokenizer.decode(token_ids)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_max_tokens_beyond_the_context_are_refused_before_the_first_token(tiny_model_dir):
    with pytest.raises(InvalidValueError, match="max_tokens is 156"):
        outputs_of(tiny_model_dir, (1,) * 200, 4, max_tokens=156)


def test_an_answer_without_reasoning_has_no_budget(tiny_model_dir, tokenizer):
    """As with enable_thinking false: a mark would stand in the middle of the answer."""
    written = encode(tokenizer, ANSWER)
    outputs = outputs_of(tiny_model_dir, written, 4, begins_with_mark)
    assert tokens_and_text(outputs) == (list(written), ANSWER)


@pytest.mark.parametrize("num_tokens", [1, 2, 12])
def test_reasoning_that_the_model_opens_is_ended(tiny_model_dir, tokenizer, num_tokens):
    """The budget may end within the opening mark."""
    written = encode(tokenizer, f"<think>{REASONED}{ANSWER}")
    outputs = outputs_of(tiny_model_dir, written, num_tokens, begins_with_mark)
    token_ids, _ = tokens_and_text(outputs)
    closing = list(encode(tokenizer, f"\n{MARK}\n\n"))
    assert token_ids[num_tokens : num_tokens + len(closing)] == closing


def with_budget(each, num_tokens, is_open=begins_inside):
    return replace(each, thinking_budget=ThinkingBudget(num_tokens, CLOSING_IDS, is_open))


def in_two_parts(make, each, num_tokens):
    """Return the tokens of a request that ends at the budget, and of one that resumes it."""
    first = replace(each, params=replace(each.params, max_tokens=num_tokens))
    known = (*tokens_by(make(), [first])[each.request_id], *CLOSING_IDS)
    rest = tokens_by(make(), [replace(each, resume_token_ids=known)])[each.request_id]
    return [*known, *rest]


def requests_of(count, **params):
    budgets = [1 + 5 * index % 13 for index in range(count)]
    prompts = [PROMPT * (1 + index % 3) for index in range(count)]
    plain = [request(str(index), prompts[index], seed=index, **params) for index in range(count)]
    return plain, budgets


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 20, "max_model_len": 80}, {"max_num_batched_tokens": 9}]
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_the_tokens_are_those_of_two_parts(
    tiny_model_dir, num_draft_tokens, is_ahead, limits, is_cached
):
    """Many at once, some with reasoning that has ended, in a full batch that is preempted."""
    config = engine_config(
        num_draft_tokens,
        async_scheduling=is_ahead,
        enable_prefix_caching=is_cached,
        max_num_seqs=5,
        **limits,
    )

    def make():
        return make_engine(tiny_model_dir, config, HashTarget(4, 512))

    plain, budgets = requests_of(12)
    asked, expected = [], {}
    for index, (each, num_tokens) in enumerate(zip(plain, budgets, strict=True)):
        is_open = index % 4 != 1
        asked.append(with_budget(each, num_tokens, lambda _, is_open=is_open: is_open))
        if is_open:
            expected[each.request_id] = in_two_parts(make, each, num_tokens)
        else:
            expected[each.request_id] = tokens_by(make(), [each])[each.request_id]
    assert tokens_by(make(), asked) == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_model_with_penalties_generates_the_tokens_of_two_parts(tiny_model_dir, num_draft_tokens):
    """The mark is in the history of the penalties, and its positions have their own noise."""

    def make():
        config = engine_config(num_draft_tokens, async_scheduling=True)
        return local_engine(tiny_model_dir, config)

    more = {"temperature": 0.9, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    plain, budgets = requests_of(4, **more)
    pairs = list(zip(plain, budgets, strict=True))
    expected = {each.request_id: in_two_parts(make, each, count) for each, count in pairs}
    engine = make()
    assert tokens_by(engine, [with_budget(*each) for each in pairs]) == expected
    assert engine.stats().counts.num_preemptions == 0


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, PROMPT], [PROMPT * 40, PROMPT]])
def test_a_request_keeps_its_seat_at_its_budget(tiny_model_dir, is_ahead, prompts):
    """Neither a request that waits nor a long prompt that is computed goes before it."""
    limits = {"max_num_batched_tokens": 8, "max_model_len": 300}
    config = engine_config(async_scheduling=is_ahead, max_num_seqs=len(prompts), **limits)
    engine = make_engine(tiny_model_dir, config, HashTarget(4, 512))
    engine.add(with_budget(request("first", PROMPT, max_tokens=20), 8))
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt))
    num_steps = []
    while not num_steps or num_steps[-1]:
        outputs = [each for each in engine.step() if each.request_id == "first"]
        num_steps.append(not any(each.is_last for each in outputs))
        assert engine.stats().num_waiting == 1 or not num_steps[-1], "the last one takes the seat"
    num_expected = 20 - len(CLOSING_IDS) + 2  # a step each, one to begin, one to close
    assert len(num_steps) <= num_expected + len(prompts)


def test_an_order_for_new_requests_does_not_end_a_running_one(tiny_model_dir):
    """An operator forbids its verifier, and others fill the queue, before its budget."""
    both = SpeculationControl("on", 32, 3, allowed_verifiers=("coupled", "rejection"))
    config = engine_config(3, max_num_seqs=1, max_queue_len=1)
    policy = SpeculationPolicy(both, clock=lambda: 0.0)
    engine = make_engine(tiny_model_dir, config, HashTarget(4, 512), policy=policy)
    chosen = SpeculationOptions(verifier="rejection")
    engine.add(with_budget(request("r", PROMPT, temperature=0.5, speculation=chosen), 12))
    outputs = [*engine.step(), *engine.step()]
    engine.set_speculation(replace(both, allowed_verifiers=("coupled",)))
    engine.add(request("new", PROMPT))
    while not outputs[-1].is_last:
        outputs += engine.step()
    token_ids, _ = tokens_and_text(outputs)
    assert (len(token_ids), tuple(token_ids[12:17])) == (24, CLOSING_IDS)
    assert {each.request_id for each in outputs} == {"r"}


@pytest.mark.parametrize("closing_ids", [(7, 100000), (-1,)])
def test_a_mark_outside_the_vocabulary_is_refused(tiny_model_dir, closing_ids):
    """As where a tokenizer has more tokens than its model."""
    engine = local_engine(tiny_model_dir, engine_config(0))
    budget = ThinkingBudget(4, closing_ids, begins_inside)
    with pytest.raises(InvalidValueError, match=r"thinking_token_budget\[\d\]"):
        engine.add(replace(request("r", PROMPT), thinking_budget=budget))
    assert not engine.has_work


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(8, 8), (1000, 8), (60, None)])
def test_a_budget_that_cuts_nothing_holds_no_step_back(tiny_model_dir, num_tokens, max_tokens):
    """The answer ends first or there: all other sequences run ahead as without a budget."""

    def num_ahead(*others):
        config = engine_config(async_scheduling=True)
        engine = make_engine(tiny_model_dir, config, HashTarget(4, 512))
        tokens = tokens_by(engine, [request("long", PROMPT * 2, max_tokens=145), *others])
        return engine.stats().counts.num_steps_ahead, tokens

    each = request("r", PROMPT * 20, max_tokens=max_tokens)
    assert num_ahead(with_budget(each, num_tokens)) == num_ahead(each)


def test_a_sequence_in_flight_is_not_restarted(tiny_model_dir):
    """Its next token, which the target samples without the mark, would be committed."""
    config = engine_config(async_scheduling=True)
    engine = make_engine(tiny_model_dir, config, HashTarget(4, 512))
    engine.add(request("r", PROMPT))
    engine.step()
    [seq] = engine._steps.sequences
    with pytest.raises(AssertionError, match="in flight"):
        engine._requests.restart(seq)
