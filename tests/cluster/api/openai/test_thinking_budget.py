"""Thinking budgets on an engine whose target writes a given text."""

from types import SimpleNamespace

import pytest

from cluster.api.openai.parsers.reasoning import SYNTAXES
from cluster.api.openai.thinking_budget import ThinkingBudget, generate_within_budget
from cluster.replica.router import Generation
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError
from specdec.types.request import GenerateRequest
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SamplingParams, StructuredOutput
from tests.specdec.engines import HashTarget, engine_config, make_engine
from tests.specdec.grammars import grammar_compiler

pytestmark = pytest.mark.asyncio

PROMPT = (1, 2, 3, 4, 5)
MARK = "</think>"
REASONED = f"So é st 冬 sto{MARK}"
ANSWER = " Yé st 冬🥖 sto ok"


class WritingTarget(HashTarget):
    """Writes the tokens of a text after the prompt, then token 0."""

    def __init__(self, token_ids):
        super().__init__(4, 512)
        self._token_ids = token_ids

    def next_token(self, context):
        place = len(context) - len(PROMPT)
        return self._token_ids[place] if place < len(self._token_ids) else 0


class EngineRouter:
    """The part of a router that a budget uses, on an engine in this process."""

    max_model_len = engine_config(0).max_model_len

    def __init__(self, directory, written):
        self.text = SimpleNamespace(tokenizer=Tokenizer(directory))
        self._directory, self._written = directory, written
        self.num_open = 0
        self.calls = []  # whether each is admitted, and the number of open streams before it

    def max_tokens(self, params):
        return min(params.max_tokens or self.max_model_len, self.max_model_len)

    async def generate(self, call, *, deadline, is_admitted=False, on_admitted=None):
        self.calls.append((is_admitted, self.num_open))
        engine = make_engine(self._directory, engine_config(0), WritingTarget(self._written))
        spec = call.params.structured_output
        grammar = None if spec is None else grammar_compiler(self._directory).compile(spec)
        engine.add(EngineRequest.of(call, call.prompt, 0, grammar, request_id=call.request_id))
        return Generation("r", 0, self._outputs(engine))

    async def _outputs(self, engine):
        self.num_open += 1
        try:
            while engine.has_work:
                for output in engine.step():
                    yield output
        finally:
            self.num_open -= 1


class RejectingRouter(EngineRouter):
    """Rejects the second call, for one of its fields."""

    def __init__(self, directory, written, field):
        super().__init__(directory, written)
        self._field = field

    async def generate(self, call, **options):
        if len(self.calls) != 1:
            return await super().generate(call, **options)
        self.calls.append(None)
        raise InvalidValueError(self._field, 5, "another value")


@pytest.fixture
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


def encode(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


async def outputs_of(directory, written, num_tokens, parser="deepseek_r1", **params):
    """Return the outputs of a call with a budget whose target writes `written`."""
    router = EngineRouter(directory, written)
    return await outputs_from(router, written, num_tokens, parser, **params)


async def outputs_from(router, written, num_tokens, parser="deepseek_r1", **params):
    closing_ids = encode(router.text.tokenizer, f"\n{MARK}\n\n")
    values = {"temperature": 0.0, "max_tokens": len(written), "ignore_eos": True, **params}
    call = GenerateRequest(PROMPT, SamplingParams(**values), request_id="r")
    budget = ThinkingBudget(num_tokens, closing_ids, SYNTAXES[parser])
    outputs = generate_within_budget(router, call, Deadline.after(60), budget, int)
    return [output async for output in outputs]


def tokens_and_text(outputs):
    assert [each.is_last for each in outputs] == [False] * (len(outputs) - 1) + [True]
    token_ids = [token for each in outputs for token in each.token_ids]
    return token_ids, "".join(each.text for each in outputs)


async def test_reasoning_that_has_ended_is_not_cut(tiny_model_dir, tokenizer):
    """The budget may end within a character, or in the start of a stop string."""
    written = encode(tokenizer, REASONED + ANSWER)
    first = len(encode(tokenizer, REASONED))
    for num_tokens in range(first + 1, len(written) + 1):
        outputs = await outputs_of(tiny_model_dir, written, num_tokens, stop=("stop", "ok then"))
        assert tokens_and_text(outputs) == (list(written), REASONED + ANSWER), num_tokens


async def test_open_reasoning_is_ended_with_all_of_its_text(tiny_model_dir, tokenizer):
    """The text withheld at the cut is sent once, before or after the mark that is appended."""
    written = encode(tokenizer, REASONED + ANSWER)
    end = len(encode(tokenizer, REASONED[: -len(MARK)])) - 1
    for num_tokens in range(1, end):
        outputs = await outputs_of(
            tiny_model_dir, written, num_tokens, stop=("stop", f"{MARK}\n\nstop")
        )
        token_ids, text = tokens_and_text(outputs)
        assert token_ids[:num_tokens] == list(written[:num_tokens])
        assert text == tokenizer.decode(token_ids), num_tokens
        assert MARK in text


async def test_an_answer_without_room_ends_with_all_of_its_text(tiny_model_dir, tokenizer):
    written = encode(tokenizer, "So é st")
    outputs = await outputs_of(tiny_model_dir, written, len(written) - 1, stop=("stop",))
    token_ids, text = tokens_and_text(outputs)
    assert token_ids == list(written[:-1])
    assert text == tokenizer.decode(token_ids)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_may_be_the_mark(tiny_model_dir, tokenizer):
    written = encode(tokenizer, REASONED + ANSWER)
    outputs = await outputs_of(tiny_model_dir, written, 4, stop=(MARK,))
    _, text = tokens_and_text(outputs)
    assert text == tokenizer.decode(written[:4]) + "\n"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, MARK)
    assert all(len(each.token_ids) == len(each.text_lengths) for each in outputs)


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_token_may_be_in_the_mark(tiny_model_dir, tokenizer, place, is_included):
    written = encode(tokenizer, REASONED + ANSWER)
    closing = encode(tokenizer, f"\n{MARK}\n\n")
    params = {"stop_token_ids": (closing[place],), "include_stop_str_in_output": is_included}
    outputs = await outputs_of(tiny_model_dir, written, 4, **params)
    token_ids, text = tokens_and_text(outputs)
    forced = closing[: closing.index(closing[place]) + 1]
    assert token_ids == [*written[:4], *forced]
    assert text == tokenizer.decode(token_ids if is_included else token_ids[:-1])
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == closing[place]


@pytest.mark.parametrize("place", [0, 3, -1])
async def test_no_stop_token_of_the_mark_ends_an_answer_before_min_tokens(
    tiny_model_dir, tokenizer, place
):
    written = encode(tokenizer, REASONED + ANSWER)
    closing = encode(tokenizer, f"\n{MARK}\n\n")
    before = 4 + closing.index(closing[place])
    for min_tokens, is_ended in ((before, True), (before + 1, False)):
        params = {"stop_token_ids": (closing[place],), "min_tokens": min_tokens}
        token_ids, _ = tokens_and_text(await outputs_of(tiny_model_dir, written, 4, **params))
        if is_ended:
            assert token_ids[4:] == list(closing[: before - 3])
        else:
            assert token_ids[:min_tokens] == list(written[:min_tokens])


@pytest.mark.parametrize("field", ["resume_token_ids", "lora"])
@pytest.mark.parametrize("spec", [None, StructuredOutput(regex=r"(.|\n)*")])
async def test_only_the_rejection_of_a_grammar_is_resumed_without_the_mark(
    tiny_model_dir, tokenizer, field, spec
):
    written = encode(tokenizer, REASONED + ANSWER)
    router = RejectingRouter(tiny_model_dir, written, field)
    outputs = outputs_from(router, written, 4, structured_output=spec)
    if spec is not None and field == "resume_token_ids":
        assert tokens_and_text(await outputs)[0] == list(written)
    else:
        with pytest.raises(InvalidValueError, match=field):
            await outputs


async def test_reasoning_goes_on_where_a_grammar_permits_no_mark(tiny_model_dir, tokenizer):
    """As in a call that began in the reasoning: its grammar goes on in the answer."""
    written = encode(tokenizer, REASONED + ANSWER)
    for regex, is_ended in ((r"So [^<]*", False), (r"(.|\n)*", True)):
        limits = {"max_tokens": 20, "structured_output": StructuredOutput(regex=regex)}
        outputs = await outputs_of(tiny_model_dir, written, 5, **limits)
        token_ids, text = tokens_and_text(outputs)
        assert token_ids[:5] == list(written[:5])
        assert text == tokenizer.decode(token_ids)
        assert (MARK in text) == is_ended
        assert [each.num_output_tokens for each in outputs] == sorted(
            each.num_output_tokens for each in outputs
        )
        assert outputs[-1].num_output_tokens == len(token_ids)


@pytest.mark.parametrize("num_tokens", [154, 155, 400])
async def test_an_answer_without_max_tokens_ends_with_the_context(
    tiny_model_dir, tokenizer, num_tokens
):
    """The budget may be larger than what the prompt leaves of the context."""
    room = EngineRouter.max_model_len - len(PROMPT)
    written = (encode(tokenizer, "So é st ") * room)[:room]
    outputs = await outputs_of(tiny_model_dir, written, num_tokens, max_tokens=None)
    token_ids, text = tokens_and_text(outputs)
    assert token_ids == list(written[: min(num_tokens, room)])
    assert text == tokenizer.decode(token_ids)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_max_tokens_beyond_the_context_are_refused_before_the_first_token(tiny_model_dir):
    router = EngineRouter(tiny_model_dir, (1,) * 200)
    call = GenerateRequest(PROMPT, SamplingParams(temperature=0.0, max_tokens=156))
    budget = ThinkingBudget(4, (2,), SYNTAXES["qwen3"])
    outputs = generate_within_budget(router, call, Deadline.after(60), budget, int)
    with pytest.raises(InvalidValueError, match="max_tokens is 156"):
        await anext(outputs)


async def test_an_answer_without_reasoning_has_no_budget(tiny_model_dir, tokenizer):
    """As with enable_thinking false: a mark would stand in the middle of the answer."""
    written = encode(tokenizer, ANSWER)
    outputs = await outputs_of(tiny_model_dir, written, 4, "qwen3")
    assert tokens_and_text(outputs) == (list(written), ANSWER)


@pytest.mark.parametrize("num_tokens", [1, 2, 12])
async def test_reasoning_that_the_model_opens_is_ended(tiny_model_dir, tokenizer, num_tokens):
    """The budget may end within the opening mark."""
    written = encode(tokenizer, f"<think>{REASONED}{ANSWER}")
    outputs = await outputs_of(tiny_model_dir, written, num_tokens, "qwen3")
    token_ids, _ = tokens_and_text(outputs)
    closing = list(encode(tokenizer, f"\n{MARK}\n\n"))
    assert token_ids[num_tokens : num_tokens + len(closing)] == closing


async def test_both_parts_are_one_request_for_drain_and_queue(tiny_model_dir, tokenizer):
    """A drain waits for open streams, and would reject a second part that begins after them."""
    written = encode(tokenizer, REASONED + ANSWER)
    router = EngineRouter(tiny_model_dir, written)
    await outputs_from(router, written, 4)
    assert router.calls == [(False, 0), (True, 1)]
    assert router.num_open == 0
