# Modules: cluster.api.openai.answer_reading, specdec.text.grammar.reasoning
"""Reasoning before a grammar: the matcher and the parser of the text find the same end of it."""

import re
from dataclasses import replace

import numpy as np
import pytest

from cluster.api.openai.parsers.pieces import Content, PlainParser
from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningParser
from cluster.api.openai.parsers.tool_format import HERMES
from specdec.models.config.model_config import ModelConfig
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import SamplingParams, StructuredOutput
from tests.cluster.api.openai.parsers.test_reasoning import reading_of, use
from tests.specdec.grammars import grammar_compiler
from tests.specdec.shared_tokenizers import tokenizer_of

STRUCTURED = (
    {"response_format": {"type": "json_object"}},
    {"guided_regex": "a"},
    {"structured_outputs": {"choice": ["a"]}},
)


def test_a_grammar_follows_reasoning():
    assert reading_of("qwen3").reasoning == "qwen3"
    assert reading_of("none").reasoning is None
    params = SamplingParams(structured_output=StructuredOutput(regex="a"))
    for changes in STRUCTURED:
        assert reading_of("none", **changes).constrained(params) is params
        for prefix, begins_inside in (("", True), ("<think>\n", True)):
            reading = replace(reading_of("deepseek_r1", **changes), prefix=prefix)
            made = reading.constrained(params).structured_output
            expected = ReasoningMarks(("<think>",), ("</think>",), begins_inside)
            assert made == replace(params.structured_output, reasoning=expected)
        for prefix in ("<think>\n\n</think>\n\n", "The answer"):
            reading = replace(reading_of("deepseek_r1", **changes), prefix=prefix)
            assert reading.constrained(params) == params
    optional = reading_of("qwen3", use(HERMES, is_forced=True)).constrained(params)
    assert not optional.structured_output.reasoning.begins_inside
    for reading in (reading_of("qwen3", response_format={"type": "text"}), reading_of("qwen3")):
        assert reading.reasoning == "qwen3"
        assert reading.constrained(params) is params


def test_a_grammar_leaves_no_place_for_channels():
    for changes in STRUCTURED:
        assert reading_of("gpt_oss", **changes).is_plain
        assert not reading_of("gpt_oss", **changes, special=("<|channel|>",)).shows_special_tokens


def test_calls_end_no_reasoning_that_a_grammar_follows():
    """Its mark must come: the calls before it would not be constrained."""
    call = HERMES.write("find", {})
    free, forced = (reading_of("qwen3", use(HERMES, is_forced=each)) for each in (False, True))
    text = f"<think>a{call}"
    assert [*free.parser().feed(text), *free.parser().finish()] != []
    parser = forced.parser()
    assert "".join(each.text for each in (*parser.feed(text), *parser.finish())) == f"a{call}"
    assert parser.num_calls == 0


@pytest.fixture(scope="module")
def compiler(tiny_model_dir):
    return grammar_compiler(tiny_model_dir)


@pytest.mark.parametrize("begins_inside", [True, False])
@pytest.mark.parametrize("name", SYNTAXES)
def test_the_parser_finds_what_the_grammar_constrains(
    compiler, tiny_model_dir, name, begins_inside
):
    """In random texts of parts of the marks, as far as the grammar permits their tokens."""
    syntax = replace(SYNTAXES[name], begins_inside=begins_inside)
    regex, tokenizer = "(yes|no), [a-c]{1,3}", tokenizer_of(tiny_model_dir)
    spec = StructuredOutput(regex=regex, reasoning=syntax.before_constrained)
    rng, start = np.random.default_rng(0), compiler.compile(spec).matcher()
    parts = [*syntax.marks, *(mark[:-1] for mark in syntax.marks), "\n", " ", ">", "so", "no, a"]
    num_ended, [end] = 0, ModelConfig.from_directory(tiny_model_dir).eos_token_ids
    for _ in range(400):
        here, tokens = start.copy(), []
        text = "".join(rng.choice(parts, 5)) + "no, ab"
        for token in tokenizer.encode(text, add_special_tokens=False):
            if here.num_valid([token]):
                here.advance(token)
                tokens.append(token)
        parser = ReasoningParser(syntax, PlainParser)
        pieces = [*parser.feed(tokenizer.decode(tokens)), *parser.finish(is_cut=True)]
        content = "".join(each.text for each in pieces if isinstance(each, Content))
        is_whole = re.fullmatch(regex, content) is not None
        assert here.num_valid([end]) == is_whole, (tokenizer.decode(tokens), content)
        num_ended += is_whole
    assert num_ended > 40
