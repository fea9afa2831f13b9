"""Masks against plain references: lists of all texts, Python's re and json, and the masks alone."""

import json
import re

import pytest

from specdec.text.grammar import translation
from specdec.text.grammar.matcher import MAX_EARLIER_STATES
from specdec.types.errors import GrammarError
from specdec.types.sampling.sampling_params import MAX_OUTPUT_CHOICES, StructuredOutput
from tests.specdec.text.grammar.json_schemas import CASES
from tests.specdec.text.grammar.vocabulary import EOS, VOCAB_SIZE, allowed, wander

REGEXES = [
    r"[a-c]{2,5}",
    r"(the|a) (river|bridge|oven)( is (cold|old))?",
    r"[0-9]{1,3}(\.[0-9]{2})?",
    r"(ab|a|abc)(c|bc)?x",
    r'"[^"\\]{0,6}"',
    r"[αβγ]{1,3}|naïve|😀+x{1,2}",
]
WITH_STATE = [  # llguidance does not roll them back
    'start: text "!"\ntext[max_tokens=4]: /[a-z ]*/',
    'start: text "!"\ntext[stop="x"]: /[a-wyz ]*/',
]
LANGUAGES = [
    ["the river", "the bridge", "the", "them"],
    ["a", "ab", "abc", "abcd", "b"],
    ["yes", "no"],
    ['ask "x"', "back\\slash", "two\nlines", "naïve", "😀", "😢"],
]


def walk(matcher, rng, most=200):
    """Sample random allowed tokens, until an end token or the limit."""
    tokens = []
    while len(tokens) < most:
        mask = allowed(matcher.allowed_mask())
        assert mask, "nothing may come"
        token = int(rng.choice(sorted(mask)))
        matcher.advance(token)
        if token in EOS:
            return tokens, True
        tokens.append(token)
    return tokens, False


@pytest.mark.parametrize("texts", LANGUAGES)
def test_masks_allow_the_continuations_of_the_texts(matcher, vocabulary, texts):
    states = [((), matcher(choice=tuple(texts)))]
    ends = set()
    for path, here in states:
        prefix = vocabulary.decode(path)
        if "�" in prefix:
            continue  # within a character: the reference supports complete characters only
        mask = allowed(here.allowed_mask())
        expected, next_chars = vocabulary.starts(texts, prefix)
        whole = {token for token in mask if token in EOS or token in vocabulary.texts}
        assert mask
        assert whole <= expected
        if len(next_chars) > 1 and next_chars <= set(map(chr, range(128))) | {""}:
            assert whole == expected, prefix
        ends |= {prefix} if mask & EOS else set()
        for token in whole - EOS:
            there = matcher(choice=tuple(texts))
            for step in (*path, token):
                there.advance(step)
            states.append(((*path, token), there))
    assert ends == {text for text in texts if text.isascii()} | (ends - set(texts))
    assert ends <= set(texts)


def test_a_choice_may_be_among_as_many_as_a_request_may_have(matcher, tokenizer):
    texts = tuple(f"item number {index}" for index in range(MAX_OUTPUT_CHOICES))
    here = matcher(choice=texts)
    for token in tokenizer.encode(texts[-1], add_special_tokens=False):
        here.allowed_mask()
        here.advance(token)
    assert here.is_finished


def test_a_choice_may_have_any_characters(matcher, vocabulary):
    text = "".join(map(chr, range(0xA1)))
    tokens = vocabulary.encode(text)
    assert matcher(choice=(text, "b")).num_valid(tokens) == len(tokens)


@pytest.mark.parametrize("texts", LANGUAGES)
def test_the_canonical_tokenization_of_every_text_is_allowed(matcher, vocabulary, texts):
    for text in texts:
        tokens = vocabulary.encode(text)
        here = matcher(choice=tuple(texts))
        assert here.num_valid(tokens) == len(tokens)
        for token in tokens:
            here.advance(token)
        assert allowed(here.allowed_mask()) >= EOS


@pytest.mark.parametrize("regex", REGEXES)
def test_random_walks_match_the_regex(matcher, vocabulary, rng, regex):
    for _ in range(30):
        tokens, ended = walk(matcher(regex=regex), rng)
        assert ended, "a regex of bounded length was not completed"
        assert re.fullmatch(regex, vocabulary.decode(tokens))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_walks_satisfy_the_schema(matcher, vocabulary, rng, case):
    num_ended = 0
    for _ in range(4):
        tokens, ended = walk(matcher(json_schema=case.text), rng, most=400)
        if ended:
            num_ended += 1
            case.validate(vocabulary.decode(tokens))
    assert num_ended > 0 or "$defs" in case.text or case.name in ("name", "capital")


def test_a_grammar_in_gbnf_and_in_lark(matcher, vocabulary, rng):
    gbnf = r"""
        root ::= sum
        sum ::= term ("+" term)?   # at most one plus
        term ::= [0-9] | "(" [0-9]{2} ")" | "\u00e9"
    """
    lark = 'start: term ("+" term)?\nterm: /[0-9]/ | "(" /[0-9]{2}/ ")" | "é"'
    inlined = lark.replace("start", "?start").replace("\nterm", "\n!term")
    captured = lark.replace("start", '!?start [capture="]"] ')
    for grammar in (gbnf, lark, inlined, captured):
        for _ in range(20):
            tokens, ended = walk(matcher(grammar=grammar), rng)
            term = r"([0-9]|\([0-9]{2}\)|é)"
            assert ended
            assert re.fullmatch(rf"{term}(\+{term})?", vocabulary.decode(tokens))


@pytest.mark.parametrize(
    "spec", [*({"regex": each} for each in REGEXES), *({"grammar": each} for each in WITH_STATE)]
)
def test_rollback_restores_the_masks(matcher, rng, spec):
    tokens, _ = walk(matcher(**spec), rng, most=20)
    here, masks = matcher(**spec), []
    for token in tokens:
        masks.append(here.allowed_mask())
        here.advance(token)
    while tokens:
        count = int(rng.integers(1, len(tokens) + 1))
        here.rollback(count)
        tokens = tokens[:-count]
        assert (here.allowed_mask() == masks[len(tokens)]).all()


def test_rollback_undoes_an_end(matcher):
    here = matcher(choice=("a", "b"))
    before = here.allowed_mask()
    token = min(allowed(before) - EOS)
    here.advance(token)
    here.advance(min(EOS))
    assert here.is_finished
    assert here.num_valid([min(EOS)]) == 1
    here.rollback(1)
    assert allowed(here.allowed_mask()) == EOS
    here.advance(max(EOS))
    here.rollback(2)
    assert not here.is_finished
    assert (here.allowed_mask() == before).all()
    assert here.num_valid([token, min(EOS), token]) == 2


def test_drafts_beyond_the_tokens_of_a_lexeme_are_not_valid(matcher, vocabulary):
    here = matcher(grammar="start: text\ntext[max_tokens=3]: /[a-z]*/")
    draft = [vocabulary.encode(char)[0] for char in "abcde"]
    assert here.num_valid(draft) == 3
    assert [bool(allowed(mask) - EOS) for mask in here.masks_along(draft)[:4]] == [True] * 3 + [
        False
    ]
    assert here.num_valid(draft) == 3


def test_more_tokens_than_earlier_states_are_not_undone(matcher, vocabulary):
    here = matcher(grammar='start: text\ntext[stop="x"]: /[a-w]*/')
    for _ in range(MAX_EARLIER_STATES + 1):
        here.advance(vocabulary.encode("a")[0])
    with pytest.raises(GrammarError, match="cannot be undone"):
        here.rollback(MAX_EARLIER_STATES + 1)


def test_masks_along_any_number_of_tokens(matcher, vocabulary):
    """They reach an end of the text under a grammar that llguidance does not roll back."""
    here = matcher(grammar="start: text\ntext[max_tokens=100]: /a*/")
    first = vocabulary.encode("a")[0]
    output = [first] * (MAX_EARLIER_STATES + 9)
    masks = here.masks_along([*output, min(EOS)])
    there = matcher(grammar="start: text\ntext[max_tokens=100]: /a*/")
    for token, mask in zip(output, masks, strict=False):
        assert (mask == there.allowed_mask()).all()
        there.advance(token)
    assert here.num_valid(output) == len(output)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: stop_word "max_tokens=" // stop="x"\nstop_word: /stop=/', True),
        ('start: text\ntext[stop="x"]: /a*/', False),
        ("start: text\ntext[capture, max_tokens = 3]: /a*/", False),
        ("start[max_tokens=3]: /a*/", False),
        ('start[stop="]"]: /a*/', False),
        ('root ::= "stop" [stop=]', True),
    ],
)
def test_options_of_lexemes_are_recognized(compiler, grammar, expected):
    assert compiler.compile(StructuredOutput(grammar=grammar)).rolls_back is expected


def test_matchers_read_no_text_of_the_grammar(compiler, monkeypatch):
    """They are made on the engine's thread, one for each choice."""
    grammar = compiler.compile(StructuredOutput(grammar='start: text\ntext[max_tokens=3]: "a"'))
    monkeypatch.setattr(translation, "_LARK_TEXTS", None)
    assert grammar.matcher()._earlier is not None


def test_masks_along_a_draft_keep_no_earlier_states(matcher):
    here = matcher(grammar="start: text\ntext[max_tokens=100]: /a*/")
    there = here.copy()
    for token in [min(allowed(here.allowed_mask()) - EOS)] * 3:
        there.advance(token)
    assert there._earlier is None
    assert not here._earlier


def test_an_end_before_optional_text(matcher):
    here = matcher(regex="a*")
    before = here.allowed_mask()
    assert here.num_valid([min(EOS), min(EOS)]) >= 1
    here.advance(min(EOS))
    assert here.is_finished
    here.rollback(1)
    assert (here.allowed_mask() == before).all()


@pytest.mark.parametrize("case", CASES[:30], ids=lambda case: case.name)
def test_forced_tokens_are_the_only_allowed_tokens(matcher, rng, case):
    here = matcher(json_schema=case.text)
    for token in walk(matcher(json_schema=case.text), rng, most=60)[0]:
        forced = here.forced_tokens(8)
        for each in forced:
            assert allowed(here.allowed_mask()) == {each}
            here.advance(each)
        here.rollback(len(forced))
        assert here.forced_tokens(1) == forced[:1]
        here.advance(token)


def test_forced_tokens_are_the_canonical_tokenization(matcher, vocabulary):
    text = '{"kind":"river","length":'
    schema = {
        "properties": {"kind": {"const": "river"}, "length": {"enum": [7, 8]}},
        "required": ["kind", "length"],
        "additionalProperties": False,
        "type": "object",
    }
    forced = matcher(json_schema=json.dumps(schema)).forced_tokens(100)
    assert list(forced) == vocabulary.encode(text)


def test_special_and_padding_tokens_are_never_allowed(matcher, rng):
    here = matcher(regex=r"(?s:.)*")
    for _ in range(30):
        mask = allowed(here.allowed_mask())
        assert 1 not in mask
        assert max(mask) < 383
        here.advance(int(rng.choice(sorted(mask - EOS))))


def test_masks_along_a_draft(matcher, vocabulary):
    here = matcher(regex="[ab]{3}")
    a, x = vocabulary.encode("a")[0], vocabulary.encode("x")[0]
    masks = here.masks_along([a, a, x, a])
    assert masks.shape == (5, -(-VOCAB_SIZE // 32))
    assert (masks[0] == here.allowed_mask()).all()
    assert x not in allowed(masks[2])
    assert (masks[3:] == -1).all()  # masks after an invalid token allow everything
    here.advance(a)
    assert (masks[1] == here.allowed_mask()).all()


def test_an_invalid_token_is_an_error_and_changes_nothing(matcher, vocabulary):
    here = matcher(choice=("yes", "no"))
    before = here.allowed_mask()
    with pytest.raises(GrammarError, match="not allowed by structured_output"):
        here.advance(vocabulary.encode("x")[0])
    assert (here.allowed_mask() == before).all()


def test_an_exhausted_grammar_fails_only_its_sequence(compiler, rng):
    grammar = compiler.compile(StructuredOutput(grammar='start: x\nx: x x x | x x | /./ | ""'))
    stuck, other = grammar.matcher(), compiler.compile(StructuredOutput(json_object=True)).matcher()
    with pytest.raises(GrammarError, match="cannot be continued"):
        wander(stuck, rng, 200)
    with pytest.raises(GrammarError):
        stuck.allowed_mask()
    assert allowed(other.allowed_mask())
