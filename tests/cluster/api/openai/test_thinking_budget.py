"""Thinking budgets on an engine whose target writes a given text."""

from types import SimpleNamespace

import pytest

from cluster.api.openai.thinking_budget import ThinkingBudget, generate_within_budget
from cluster.replica.router import Generation
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.request import GenerateRequest
from specdec.types.responses import FinishReason
from specdec.types.sampling_params import SamplingParams
from tests.specdec.engines import HashTarget, engine_config, make_engine

pytestmark = pytest.mark.asyncio

PROMPT = (1, 2, 3, 4, 5)
MARK = "</think>"
REASONED = f"So é st 冬 sto{MARK}"
ANSWER = " Yé st 冬🥖 sto ok"


class WritingTarget(HashTarget):
    """Writes the tokens of a text behind the prompt, then token 0."""

    def __init__(self, token_ids):
        super().__init__(4, 512)
        self._token_ids = token_ids

    def next_token(self, context):
        place = len(context) - len(PROMPT)
        return self._token_ids[place] if place < len(self._token_ids) else 0


class EngineRouter:
    """The part of a router that a budget uses, on an engine in this process."""

    def __init__(self, directory, written):
        self.text = SimpleNamespace(tokenizer=Tokenizer(directory))
        self._directory, self._written = directory, written

    def max_tokens(self, params):
        return params.max_tokens

    async def generate(self, call):
        engine = make_engine(self._directory, engine_config(0), WritingTarget(self._written))
        engine.add(EngineRequest.of(call, call.prompt, 0))
        return Generation(0, self._outputs(engine))

    async def _outputs(self, engine):
        while engine.has_work:
            for output in engine.step():
                yield output


@pytest.fixture
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


def encode(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


async def outputs_of(directory, written, num_tokens, **params):
    """Return the outputs of a call with a budget whose target writes `written`."""
    router = EngineRouter(directory, written)
    closing_ids = encode(router.text.tokenizer, f"\n{MARK}\n\n")
    values = {"temperature": 0.0, "max_tokens": len(written), "ignore_eos": True, **params}
    call = GenerateRequest(PROMPT, SamplingParams(**values), request_id="r")
    budget = ThinkingBudget(num_tokens, closing_ids, (MARK,))
    return [output async for output in generate_within_budget(router, call, budget)]


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
    """The text withheld at the cut is sent once, before or behind the mark that is appended."""
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
