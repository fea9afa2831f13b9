"""Grammars after reasoning, against the text: its marks, wherever tokens end, and its answer."""

import json
import re

import numpy as np
import pytest

from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.grammar.matcher import MAX_EARLIER_STATES, OutputConstraint
from specdec.text.grammar.reasoning import MAX_SPACES, FreeText, Part, Place
from specdec.text.grammar.vocabulary import GrammarVocabulary
from specdec.types.errors import GrammarError
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.text.grammar.vocabulary import EOS, VOCAB_SIZE, allowed

IM_START = 1
"""A special token; the other two are in EOS."""

INSIDE = ReasoningMarks(("<think>",), ("</think>",), begins_inside=True)
OPTIONAL = ReasoningMarks(("<think>",), ("</think>",))
SPOKEN = ReasoningMarks(("So: ",), ("\nThus:", "\nThis:"))
SPECIAL = ReasoningMarks((), ("<|im_start|>",), begins_inside=True)
ANSWER = "(yes|no), [a-c]{1,3}"
KINDS = {
    "json_schema": '{"type":"object","properties":{"a":{"enum":["x","y"]}},"required":["a"],'
    '"additionalProperties":false}',
    "json_object": True,
    "regex": ANSWER,
    "choice": ("yes, a", "no, abc"),
    "grammar": 'start: word ", " /[a-c]{1,3}/\nword: "yes" | "no"',
}
GBNF = 'root ::= ("yes" | "no") ", " [a-c]{1,3}'
WITH_STATE = 'start: text "!"\ntext[max_tokens=4]: /[a-z ]+/'


def is_answer(kind, text):
    if kind.startswith("json"):
        value = json.loads(text)
        return isinstance(value, dict) and (kind == "json_object" or value["a"] in ("x", "y"))
    return re.fullmatch(ANSWER, text) is not None


@pytest.fixture
def after(compiler):
    """Return a function that makes a matcher of an answer after reasoning."""
    return lambda marks, **spec: compiler.compile(
        StructuredOutput(**spec, reasoning=marks)
    ).matcher()


@pytest.fixture
def spell(vocabulary):
    """Return the tokens of a text, one for each character or as the tokenizer divides it."""

    def tokens_of(text, is_split=True):
        parts = text if is_split else (text,)
        return [token for part in parts for token in vocabulary.encode(part)]

    return tokens_of


def follow(matcher, tokens):
    for token in tokens:
        assert token in allowed(matcher.allowed_mask())
        matcher.advance(token)
    return matcher


def finish(matcher, rng):
    """Add random allowed tokens up to an end token; return the others."""
    tokens = []
    for _ in range(300):
        mask = allowed(matcher.allowed_mask())
        token = int(rng.choice(sorted(mask)))
        matcher.advance(token)
        if token in EOS:
            return tokens
        tokens.append(token)
    pytest.fail("no end")


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (INSIDE, "No. Yes {</thin</think>"),
        (INSIDE, "</think>\n\n"),
        (INSIDE, "<think>again</think> "),
        (OPTIONAL, "<think>\nLet me see.\n</think>\n\n"),
        (OPTIONAL, "\n<think></think>\n"),
        (OPTIONAL, "</think>"),
        (SPOKEN, "So: the river\nThis is\nThis:\n"),
        (SPOKEN, "So: \nThus: "),
        (SPECIAL, "ab<|im_start|>\n"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_up_to_the_mark_is_followed_by_an_answer(
    after, spell, vocabulary, rng, kind, marks, text, is_split
):
    *parts, last = text.split("<|im_start|>")
    tokens = [token for part in parts for token in (*spell(part, is_split), IM_START)]
    here = follow(after(marks, **{kind: KINDS[kind]}), tokens + spell(last, is_split))
    assert not here.is_finished
    if kind != "json_object":
        answer = vocabulary.decode(finish(here, rng))
        assert is_answer(kind, answer.lstrip())
        assert len(answer) - len(answer.lstrip()) <= MAX_SPACES


def test_a_grammar_of_llama_cpp_follows_reasoning(after, spell, vocabulary, rng):
    here = follow(after(INSIDE, grammar=GBNF), spell("hm</think>"))
    assert is_answer("regex", vocabulary.decode(finish(here, rng)).strip())


def test_reasoning_is_any_text_and_no_end(after, spell):
    here = after(INSIDE, regex=ANSWER)
    for text in ("", "the <", "/thin", "g>: </think"):
        follow(here, spell(text))
        mask = allowed(here.allowed_mask())
        assert EOS.isdisjoint(mask)
        assert mask >= set(range(VOCAB_SIZE)) - EOS - set(spell(">"))
        assert not here.is_finished
        assert here.forced_tokens(8) == ()


def test_an_answer_without_reasoning_may_begin_at_once(after, spell):
    here = after(OPTIONAL, regex=ANSWER)
    first = allowed(here.allowed_mask())
    assert first >= set(spell("yn< \n"))
    assert first.isdisjoint(spell("abc>/"))
    assert EOS.isdisjoint(first)
    direct, plain = here.copy(), after(None, regex=ANSWER)
    for token in spell("yes, a"):
        direct.advance(token)
        plain.advance(token)
        assert (direct.allowed_mask() == plain.allowed_mask()).all()


@pytest.mark.parametrize("text", ["<thanks>", "<think!>"])
def test_a_beginning_of_a_mark_may_be_the_answer(after, spell, text):
    answers = "[<a-z!>]+"
    here = follow(after(OPTIONAL, regex=answers), spell(text))
    assert allowed(here.allowed_mask()) >= EOS
    here = follow(after(OPTIONAL, regex=answers), spell("<think>"))
    assert EOS.isdisjoint(allowed(here.allowed_mask()))
    follow(here, spell(f"anything</think>{text}"))
    assert allowed(here.allowed_mask()) >= EOS


def test_space_after_the_mark_is_of_an_answer_that_begins_with_it(after, spell):
    here = follow(after(INSIDE, choice=("\nyes", " no")), spell("</think>\n"))
    assert allowed(here.allowed_mask()) == set(spell("y"))
    here = follow(after(INSIDE, regex="x"), spell("</think>" + " " * MAX_SPACES))
    assert allowed(here.allowed_mask()) == set(spell("x"))


def test_a_token_that_ends_the_mark_has_nothing_of_the_answer(after, spell, vocabulary):
    """But for white space: the mark ends within tokens of the vocabulary."""
    texts = vocabulary.texts
    long = next(each for each, text in texts.items() if re.fullmatch("[a-z]{3}", text))
    mark = "#" + texts[long][0]
    here = follow(after(ReasoningMarks((), (mark,), True), regex=".{9}"), spell("#"))
    assert long not in allowed(here.allowed_mask())
    assert here.num_valid([long]) == 0
    with pytest.raises(GrammarError, match=f"token {long} is not allowed"):
        here.advance(long)
    follow(here, spell(mark[1:]))
    follow(here, [long])  # of the answer


TOKENS = ("end", "a", "</think", ">", ">\n\n", ">{", "x</think>", "</think>{", "\n", " " * 5, "<")
TOKENS += ("<think>", "\n<", "think>so", "\n</think>\n", "", "hidden")


@pytest.mark.parametrize(
    ("prefix", "part", "texts"),
    [
        ("a", Part.REASONING, {*TOKENS} - {"end", "</think>{"}),
        ("</think", Part.REASONING, {*TOKENS} - {"end", "</think>{", ">{"}),
        ("", Part.START, {"</think", "\n", "<", "<think>", "\n<", "\n</think>\n"}),
        ("<", Part.START, {"think>so"}),
        ("\n\n\n\n", Part.START, {"</think", "<", "<think>"}),
        ("</think", Part.START, {">", ">\n\n"}),
        ("\n\n", Part.GAP, {"\n"}),
        ("\n\n\n\n", Part.GAP, set()),
    ],
)
def test_tokens_before_the_answer_are_read_as_text(prefix, part, texts):
    vocabulary = GrammarVocabulary("", TOKENS, (0, len(TOKENS) - 1), (0,))
    free = FreeText(vocabulary, OPTIONAL, 1)
    place = Place(part, prefix.encode()) if part is not Part.REASONING else Place(part)
    if part is Part.REASONING and prefix != "a":
        place = free.after(place, TOKENS.index(prefix))
    mask = allowed(free.mask(place)) & {*range(len(TOKENS))}
    assert {TOKENS[each] for each in mask} == texts
    for token_id in range(len(TOKENS)):
        assert (free.after(place, token_id) is not None) == (token_id in mask)


@pytest.mark.parametrize("part", [Part.START, Part.GAP])
def test_all_white_space_of_one_length_is_one_place(part):
    """Each place has a mask, which is kept: 19 kB for 150,000 tokens."""
    free = FreeText(GrammarVocabulary("", ("end", " ", "\t", "\r", "\n"), (0,), (0,)), OPTIONAL, 1)
    places = {Place(part)}
    for _ in range(MAX_SPACES):
        places = {free.after(place, token_id) for place in places for token_id in range(1, 5)}
        assert len(places) == 1
    assert free.after(places.pop(), 1) is None


@pytest.mark.parametrize("spec", [{"regex": "[a-d]{1,4}x"}, {"grammar": WITH_STATE}])
@pytest.mark.parametrize("marks", [INSIDE, OPTIONAL, SPOKEN])
def test_masks_advances_and_validity_agree_and_are_undone(after, spell, rng, marks, spec):
    """Random walks along the mark, with tokens of reasoning, mark and answer."""
    text = f"{marks.openings[0]}a{marks.closings[0]}\nabx!"
    likely = sorted({*spell(text), *spell(text, is_split=False), *EOS})
    num_finished = 0
    for _ in range(30):
        here, path = after(marks, **spec), []
        for _ in range(25):
            mask = allowed(here.copy().allowed_mask())
            for token in rng.choice(likely, 4).tolist():
                assert here.num_valid([token]) == (token in mask)
            draft = some_text(
                rng, [marks.openings[0], "a", *marks.closings, "\n", "ax", "!"], spell
            )
            num_valid = here.num_valid(draft)
            masks = here.masks_along(draft)
            assert allowed(masks[0]) == mask
            for index, token in enumerate(draft[:num_valid]):
                assert token in allowed(masks[index])
                here.advance(token)
            if num_valid < len(draft):
                assert draft[num_valid] not in allowed(masks[num_valid])
                with pytest.raises(GrammarError):
                    here.advance(draft[num_valid])
            num_kept = int(rng.integers(0, num_valid + 1))
            here.rollback(num_valid - num_kept)
            path += draft[:num_kept]
            fresh = after(marks, **spec)
            for token in path:
                fresh.advance(token)
            assert (here.copy().allowed_mask() == fresh.allowed_mask()).all()
            assert here.is_finished == fresh.is_finished
            if here.is_finished:
                num_finished += 1
                break
    assert num_finished > 5


def some_text(rng, parts, spell):
    text = "".join(rng.choice(parts, 2))
    return spell(text, is_split=bool(rng.integers(2)))


def test_tokens_are_undone_up_to_a_limit(after, spell):
    here = after(INSIDE, regex=ANSWER)
    for token in spell("a" * (MAX_EARLIER_STATES + 1)):
        here.advance(token)
    with pytest.raises(GrammarError, match="cannot be undone"):
        here.rollback(MAX_EARLIER_STATES + 1)


def test_drafts_go_on_over_the_mark(compiler, spell, vocabulary):
    grammar = compiler.compile(StructuredOutput(choice=("yes, a",), reasoning=INSIDE))
    constraint = OutputConstraint(grammar, 0, 0, EOS)
    draft = spell("so</think>yes, x")
    drafted = constraint.extend(draft, 32)
    assert vocabulary.decode(drafted.token_ids) == "so</think>yes, a"
    assert allowed(drafted.masks[-1]) == EOS
    along = constraint.along(draft)
    assert along.token_ids == tuple(draft)
    assert allowed(along.masks[len(draft) - 1]) == {vocabulary.encode("a")[0]}
    assert np.array_equal(along.masks[-1], np.full_like(along.masks[-1], -1))
    parents = [-1, 0, 1, 0]
    tree = constraint.prune(spell("s</q"), parents, 8)
    assert tree.token_ids == tuple(spell("s</q"))


def test_min_tokens_masks_stop_tokens_in_reasoning(compiler, spell):
    grammar = compiler.compile(StructuredOutput(regex=ANSWER, reasoning=INSIDE))
    [stop] = spell("q")
    constraint = OutputConstraint(grammar, 0, 2, {*EOS, stop})
    masks = constraint.along(spell("aa")).masks
    assert [stop in allowed(mask) for mask in masks] == [False, False, True]
    assert all(EOS.isdisjoint(allowed(mask)) for mask in masks)


def test_copies_share_the_text_before_the_answer(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS, tries_first=False)
    inside, optional, plain = (
        compiler.compile(StructuredOutput(regex=ANSWER, reasoning=marks), num_sequences=40)
        for marks in (INSIDE, OPTIONAL, None)
    )
    assert inside.reasoning is inside.of_choice(39).reasoning is optional.reasoning
    assert inside.of_choice(39) is not inside
    assert not hasattr(plain, "reasoning")
    compiler.close()
