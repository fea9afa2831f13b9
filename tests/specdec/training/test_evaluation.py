"""Measurement of a drafter on the tiny model: one that drafts for itself is always right."""

import shutil

import pytest

from specdec import LLM
from specdec.text.tokenizer import Tokenizer
from specdec.training.data.prompts import PromptRecord
from specdec.training.evaluation import (
    Answer,
    DrafterEvaluation,
    EvaluationConfig,
    PositionCounts,
    SuiteResult,
)
from specdec.types.errors import ContextLengthError, InvalidValueError
from tests.specdec.llm.models import arguments

PROMPTS = [PromptRecord(("Ask the baker",), "a"), PromptRecord(("When will it open?",), "b")]


def test_a_drafter_that_is_always_right(tiny_model_dir):
    config = EvaluationConfig(temperatures=(0.0, 1.0), max_tokens=17)
    advanced = []
    with LLM(**arguments(tiny_model_dir)) as llm:
        evaluation = DrafterEvaluation(llm, Tokenizer(tiny_model_dir), config)
        results = evaluation.run(PROMPTS, lambda: advanced.append(None))
        assert llm.speculation.mode == "auto"
    cells = [(each.suite, each.temperature) for each in results]
    assert cells == [("a", 0.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)]
    assert len(advanced) == 4
    for each in results:
        assert each.num_other_answers == 0
        assert (each.num_prompts, each.num_drafts > 0) == (1, True)
        assert each.acceptance_by_position[0] == 1.0
        assert each.num_tokens - 1 <= each.num_steps + sum(each.num_accepted)
        assert each.speedup == pytest.approx(each.tokens_per_s / each.baseline_tokens_per_s)
    # Without an end of text, 16 tokens after the first are four steps of three drafts each.
    long = [each for each in results if each.num_tokens == 17]
    assert [each.mean_accepted_length for each in long] == [4.0] * len(long) != []
    assert [(each.num_steps, each.num_accepted) for each in long] == [(4, (4, 4, 4))] * len(long)


def test_prompts_without_room_for_an_answer_are_left_out(tiny_model_dir, caplog):
    config = EvaluationConfig(temperatures=(0.0,), max_tokens=8)
    long = PromptRecord(("water " * 600,), "long")
    with LLM(**arguments(tiny_model_dir)) as llm:
        evaluation = DrafterEvaluation(llm, Tokenizer(tiny_model_dir), config)
        [result] = evaluation.run([long, PROMPTS[0]])
        with pytest.raises(ContextLengthError, match="max_tokens is 8"):
            evaluation.run([long])
    assert (result.suite, result.num_prompts) == ("a", 1)
    assert "prompt 1 (long) is left out: it has " in caplog.text


def test_a_model_without_a_chat_template_continues_the_text(tiny_model_dir, tmp_path):
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    config = EvaluationConfig(temperatures=(0.0,), max_tokens=8)
    with LLM(**arguments(directory)) as llm:
        results = DrafterEvaluation(llm, Tokenizer(directory), config).run(PROMPTS)
    assert [each.num_prompts for each in results] == [1, 1]


def test_an_engine_that_drafts_nothing_is_refused(tiny_model_dir):
    with (
        LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm,
        pytest.raises(InvalidValueError, match="a configuration that drafts"),
    ):
        DrafterEvaluation(llm, Tokenizer(tiny_model_dir), EvaluationConfig())


def test_acceptance_by_position():
    before = PositionCounts((2, 1), (1,))
    after = PositionCounts((12, 11, 4), (9, 4))
    counts = after.minus(before)
    assert counts == PositionCounts((10, 10, 4), (8, 4))
    assert counts.rates == (0.8, 0.4, 0.0)
    assert counts.mean_accepted_length == 2.2
    assert counts.acceptance_rate == 0.5
    assert (PositionCounts().mean_accepted_length, PositionCounts().acceptance_rate) == (1, 0)


def test_a_suite_has_medians_of_its_prompts():
    def answer(rate, baseline, is_same=True):
        return Answer(8, PositionCounts((2,), (1,)), rate, baseline, is_same)

    cells = [answer(30.0, 10.0), answer(20.0, 20.0, False), answer(12.0, 8.0), answer(None, None)]
    result = SuiteResult.of("a", 0.7, cells)
    assert (result.tokens_per_s, result.baseline_tokens_per_s, result.speedup) == (20.0, 10.0, 1.5)
    assert (result.num_prompts, result.num_tokens, result.num_other_answers) == (4, 32, 1)
    assert (result.num_drafts, result.mean_accepted_length) == (8, 1.5)
    # Each answer has a first token, and seven more of which one was drafted.
    assert (result.num_steps, result.num_accepted) == (24, (4,))
    assert SuiteResult.of("a", 0.7, cells[3:]).speedup is None


@pytest.mark.parametrize(
    "values", [{"temperatures": ()}, {"temperatures": (-1.0,)}, {"max_tokens": 1}]
)
def test_invalid_settings_are_refused(values):
    with pytest.raises(InvalidValueError, match=next(iter(values))):
        EvaluationConfig(**values)
