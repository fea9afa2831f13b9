"""Validation of requests on the callers' threads, while the engine's thread uses the grammar."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from specdec.engine.engine_thread import EngineThread
from specdec.engine.requests.input_processor import InputProcessor
from specdec.models.config.model_config import ModelConfig
from specdec.text.grammar.matcher import MAX_SHARING, Grammar
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.grammars import grammar_compiler
from tests.waiting import eventually

PROMPT = list(range(40, 52))
SPEC = StructuredOutput(regex="[a-z ]{60}")
NUM_CALLERS = 4
CAPITAL_P = 50


@pytest.fixture
def grammar(tiny_model_dir):
    return grammar_compiler(tiny_model_dir).compile(SPEC)


@pytest.fixture
def engine(tiny_model_dir):
    return local_engine(tiny_model_dir, engine_config(4))


def ask(grammar, name="r", resume=(), **params):
    params = {"structured_output": SPEC, "max_tokens": 100, "temperature": 1.0, **params}
    made = request(name, PROMPT, **params)
    return replace(made, grammar=grammar, resume_token_ids=tuple(resume))


async def tokens_of(thread, asked):
    return [token async for output in thread.generate(asked) for token in output.token_ids]


@contextmanager
def checked_on_other_threads(engine, asked):
    """Check the requests in a loop on several threads inside the context; yield the counts."""
    is_over, counts = threading.Event(), [0] * NUM_CALLERS

    def check(caller):
        while not is_over.is_set():
            engine.check(asked[counts[caller] % len(asked)])
            counts[caller] += 1

    callers = [threading.Thread(target=check, args=(each,)) for each in range(NUM_CALLERS)]
    for each in callers:
        each.start()
    try:
        yield counts
    finally:
        is_over.set()
        for each in callers:
            each.join()


async def test_checks_beside_a_running_grammar_touch_no_matcher(
    tiny_model_dir, engine, grammar, monkeypatch
):
    asked = [ask(grammar, f"r{seed}", seed=seed) for seed in range(3)]
    plain = local_engine(tiny_model_dir, engine_config(0))
    alone = {name: each.token_ids for name, each in run(plain, asked).items()}
    resumed = [replace(each, resume_token_ids=tuple(alone[each.request_id][:9])) for each in asked]
    made_on, matcher = [], Grammar.matcher

    def recorded(self):
        made_on.append(threading.current_thread().name)
        return matcher(self)

    monkeypatch.setattr(Grammar, "matcher", recorded)
    thread = EngineThread(engine)
    with checked_on_other_threads(engine, resumed) as counts:
        await eventually(lambda: min(counts) > 0)
        generated = {each.request_id: await tokens_of(thread, each) for each in asked}
    await thread.close()
    assert generated == alone
    assert made_on == ["engine"] * len(asked)


def test_choices_use_the_copies_of_their_grammar(engine, tiny_model_dir, monkeypatch):
    made_of, matcher = [], Grammar.matcher

    def recorded(self):
        made_of.append(self.start)
        return matcher(self)

    monkeypatch.setattr(Grammar, "matcher", recorded)
    num_choices = MAX_SHARING + 3
    grammar = grammar_compiler(tiny_model_dir).compile(SPEC, num_sequences=num_choices)
    engine.check(ask(grammar, n=num_choices))
    assert not made_of
    engine.add(ask(grammar, n=num_choices))
    assert sorted(map(made_of.count, set(made_of))) == [3, MAX_SHARING]


def test_a_check_rejects_resume_tokens_that_end_the_text(engine, grammar):
    with pytest.raises(InvalidValueError, match="number 1 ends the text"):
        engine.check(ask(grammar, resume=[70, 2]))


async def test_resume_tokens_that_the_grammar_forbids_are_reported_to_their_caller(engine, grammar):
    thread = EngineThread(engine)
    with pytest.raises(InvalidValueError, match="output that structured_output allows"):
        await tokens_of(thread, ask(grammar, resume=[CAPITAL_P]))
    assert len(await tokens_of(thread, ask(grammar))) > 0
    await thread.close()


def test_the_text_of_each_choice_continues_the_prompt(engine, tiny_model_dir, llama2_like):
    """The tokenizer is another one than the model's, whose vocabulary has all of its ids."""
    model = ModelConfig.from_directory(tiny_model_dir)
    inputs = InputProcessor(engine.config, model, llama2_like)
    [prompt, river] = [llama2_like.token_id(each) for each in ("▁the", "▁river")]
    for seq in inputs.sequences(request("r", [prompt], n=2), 0, engine.control):
        seq.detokenizer.append(river)
        assert seq.detokenizer.take() == " river"
