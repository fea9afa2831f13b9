# Modules: specdec.text.grammar.reasoning
"""The real engine: answers that follow a grammar after reasoning, the same with speculation."""

import re
from dataclasses import replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.errors import InvalidValueError
from specdec.types.request import ThinkingBudget
from specdec.types.responses import FinishReason
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker import HeadFiles
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import HEADS
from tests.specdec.shared_tokenizers import tokenizer_of

INSIDE = ReasoningMarks(("q",), ("e", "st"), begins_inside=True)
"""Marks that come soon in random text, also within tokens such as `the`."""

OPTIONAL = replace(INSIDE, openings=("zq",), begins_inside=False)
REGEX = "[a-dfmoswy][a-z]{0,5} (river|bridge) is [a-z]{2,8} and [0-9]{1,3}"
OUTPUT = re.compile(rf"(?s:.*?)(?:e|st)\s{{0,4}}{REGEX}")
METHODS = ["ngram", "draft_model", "medusa", "eagle3"]


@pytest.fixture(scope="module")
def ask(tiny_model_dir):
    """Return a function that makes requests for an answer after reasoning."""
    compiler = grammar_compiler(tiny_model_dir)

    def make(name, marks=INSIDE, resume=(), seed=0, regex=REGEX, **params):
        spec = StructuredOutput(regex=regex, reasoning=marks)
        params = {"max_tokens": 140, "temperature": 1.0, "seed": seed, **params}
        prompt = [(29 * seed + 31 * place) % 380 + 3 for place in range(12)]
        made = request(name, prompt, structured_output=spec, **params)
        return replace(made, grammar=compiler.compile(spec), resume_token_ids=tuple(resume))

    return make


@pytest.fixture(scope="module")
def expected(tiny_model_dir, ask):
    asked = requests(ask)
    return run(local_engine(tiny_model_dir, engine_config(0)), asked)


@pytest.fixture(scope="module")
def head_dirs(tiny_model_dir, tmp_path_factory, expected):
    texts = [each.token_ids for each in expected.values()]
    return {
        name: HEADS[name](tiny_model_dir, tmp_path_factory.mktemp(name), texts)
        for name in METHODS[2:]
    }


@pytest.fixture
def engine_of(tiny_model_dir, head_dirs):
    """Return a function that makes an engine with a drafting method, off for none."""

    def make(method, group=None, **changes):
        if method not in HEADS:
            config = engine_config(0 if method == "off" else 4, **changes)
            proposer = draft_model(tiny_model_dir, group) if method == "draft_model" else None
            return local_engine(tiny_model_dir, config, group, proposer)
        head = HeadFiles(head_dirs[method], method=method)
        config = engine_config(
            speculation=SpeculativeConfig.of(method, 3, model=str(head_dirs[method])), **changes
        )
        policy = SpeculationPolicy(SpeculationControl("on", 32, 3), clock=lambda: 0.0)
        return local_engine(tiny_model_dir, config, group, policy=policy, head=head)

    return make


def requests(ask, count=6, **params):
    return [
        ask(f"{kind} {seed} {temperature}", marks, seed=seed, temperature=temperature, **params)
        for kind, marks in (("inside", INSIDE), ("optional", OPTIONAL))
        for seed in range(count)
        for temperature in (0.7, 1.0)
    ]


def test_answers_follow_reasoning_or_begin_at_once(expected):
    texts = {name: each.text for name, each in expected.items()}
    inside = [text for name, text in texts.items() if name.startswith("inside")]
    optional = [text for name, text in texts.items() if name.startswith("optional")]
    assert all(OUTPUT.fullmatch(text) for text in inside)
    assert len({text.index("e") for text in inside}) > 2
    is_direct = [re.fullmatch(REGEX, text) is not None for text in optional]
    for text, direct in zip(optional, is_direct, strict=True):
        assert direct or OUTPUT.fullmatch(text)
    assert any(is_direct)
    assert all(each.finish_reason is FinishReason.STOP for each in expected.values())


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token(ask, expected, engine_of, method):
    """Together with requests without a grammar, which stay the same."""
    free = [request(f"f{i}", [60 + i] * 9, temperature=1.0, seed=i) for i in range(2)]
    alone = tokens_by(engine_of("off"), free)
    engine = engine_of(method, max_num_seqs=16)
    found = tokens_by(engine, [*requests(ask), *free])
    assert found == {name: each.token_ids for name, each in expected.items()} | alone
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "typical", "threshold"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_verifier_follows_the_grammar_over_the_mark(ask, engine_of, method, verifier):
    engine = engine_of(method)
    asked = requests(ask, speculation=SpeculationOptions(verifier=verifier))
    for name, each in run(engine, asked).items():
        assert each.finish_reason is FinishReason.STOP
        pattern = OUTPUT if name.startswith("inside") else re.compile(f"{OUTPUT.pattern}|{REGEX}")
        assert pattern.fullmatch(each.text)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


def test_the_draft_model_follows_the_grammar_over_the_mark(ask, engine_of):
    engine = engine_of("draft_model")
    run(engine, requests(ask))
    stats = engine.stats().counts.speculation
    assert stats.num_accepted_tokens >= 0.98 * stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["off", "draft_model"])
def test_ranks_agree(ask, expected, engine_of, method):
    asked = requests(ask, 2)
    for rank in run_ranks(2, lambda group: tokens_by(engine_of(method, group), asked)):
        assert rank == {each.request_id: expected[each.request_id].token_ids for each in asked}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_preemption_and_chunks_change_no_token(ask, expected, engine_of, method):
    engine = engine_of(method, num_blocks=40, max_num_batched_tokens=24)
    found = tokens_by(engine, requests(ask))
    assert found == {name: each.token_ids for name, each in expected.items()}
    assert engine.stats().counts.num_preemptions > 0


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
def test_a_resumed_request_continues_its_reasoning_and_its_answer(ask, engine_of, method):
    whole = tokens_by(engine_of("off"), [ask("r", seed=3)])["r"]
    for num_known in range(1, len(whole), 3):
        resumed = ask("r", seed=3, resume=whole[:num_known])
        assert whole[:num_known] + tokens_by(engine_of(method), [resumed])["r"] == whole


def test_resumed_tokens_that_break_the_grammar_are_rejected(ask, engine_of, tiny_model_dir):
    engine = engine_of("off")
    whole = tokens_by(engine, [ask("r", seed=3)])["r"]
    with pytest.raises(InvalidValueError, match="resume_token_ids"):
        engine.add(ask("r", seed=3, resume=[*whole[:-2], 1]))


def test_choices_do_not_depend_on_their_number(ask, engine_of):
    def texts(count):
        engine, found = engine_of("ngram"), [""] * count
        engine.add(ask("r", seed=5, n=count))
        while engine.has_work:
            for output in engine.step():
                found[output.choice] += output.text
        return found

    three = texts(3)
    assert len(set(three)) == 3
    assert all(OUTPUT.fullmatch(text) for text in three)
    assert texts(1) == three[:1]


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_a_budget_ends_the_reasoning_before_the_answer(ask, engine_of, tiny_model_dir, method):
    marks = ReasoningMarks((), ("<end>",), begins_inside=True)
    closing = tuple(tokenizer_of(tiny_model_dir).encode("\n<end>\n\n", add_special_tokens=False))
    budget = ThinkingBudget(7, closing, lambda text: "<end>" not in text)
    asked = replace(ask("r", marks), thinking_budget=budget)
    found = run(engine_of(method), [asked])["r"]
    assert found.token_ids[7 : 7 + len(closing)] == list(closing)
    assert re.fullmatch(rf"(?s:.*?)\n<end>\n\n\s{{0,2}}{REGEX}", found.text)


def test_min_and_max_tokens_and_stop_strings_hold_in_reasoning(ask, engine_of):
    engine = engine_of("ngram")
    marks = ReasoningMarks((), ("<end>",), begins_inside=True)
    cut = run(engine, [ask("r", marks, max_tokens=9, ignore_eos=True)])["r"]
    assert (len(cut.token_ids), cut.finish_reason) == (9, FinishReason.LENGTH)
    stopped = run(engine, [ask("r", marks, stop=("e",))])["r"]
    assert stopped.finish_reason is FinishReason.STOP
    assert "e" not in stopped.text
    later = run(engine, [ask("r", marks, stop=("e",), min_tokens=30)])["r"]
    assert len(later.token_ids) > 30
