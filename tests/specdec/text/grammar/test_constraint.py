"""Drafts under a grammar."""

import pytest

from specdec.text.grammar.matcher import OutputConstraint
from specdec.types.errors import GrammarError
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.text.grammar.vocabulary import EOS, allowed

PROMPT = [5, 6, 7]


@pytest.fixture
def constraint(compiler):
    def make(min_tokens=0, **spec):
        grammar = compiler.compile(StructuredOutput(**spec))
        return OutputConstraint(grammar, len(PROMPT), min_tokens, EOS)

    return make


@pytest.fixture
def spell(vocabulary):
    """Return one token for each character."""
    return lambda text: [vocabulary.encode(char)[0] for char in text]


def test_a_draft_is_cut_at_its_first_invalid_token(constraint, spell):
    drafted = constraint(regex="[ab]{9}").extend(spell("abxa"), 8)
    assert list(drafted.token_ids) == spell("ab")
    assert len(drafted.masks) == 3


def test_the_limit_of_tokens_is_respected(constraint, spell):
    assert list(constraint(regex="[ab]{9}").extend(spell("abab"), 3).token_ids) == spell("aba")
    drafted = constraint(choice=("the river is cold",)).extend((), 0)
    assert drafted.token_ids == ()
    assert len(drafted.masks) == 1


def test_forced_tokens_are_drafted_without_a_proposal(constraint, vocabulary):
    text = "the river"
    drafted = constraint(choice=(text,)).extend((), 20)
    assert list(drafted.token_ids) == vocabulary.encode(text)
    assert allowed(drafted.masks[-1]) == EOS
    for token, mask in zip(drafted.token_ids, drafted.masks, strict=False):
        assert allowed(mask) == {token}


def test_forced_tokens_are_added_to_and_replace_drafts(constraint, spell, vocabulary):
    forced = vocabulary.encode("-river")
    free = constraint(regex="[ab]{2}-river[ab]")
    good = free.extend([*spell("ab"), *forced, *spell("b")], 20)
    assert list(good.token_ids) == [*spell("ab"), *forced, *spell("b")]
    wrong = free.extend([*spell("abx"), *forced[1:], *spell("b")], 20)
    assert list(wrong.token_ids) == [*spell("ab"), *forced]


def test_nothing_is_drafted_after_the_end(constraint, spell):
    assert list(constraint(regex="[ab]{2}").extend(spell("abab"), 8).token_ids) == spell("ab")


def test_drafting_does_not_change_the_grammar_state(constraint, spell):
    here = constraint(regex="[ab]{4}c[ab]{2}")
    first = here.extend(spell("abab"), 8)
    again = here.extend(spell("abab"), 8)
    assert first.token_ids == again.token_ids
    assert (first.masks == again.masks).all()


@pytest.mark.parametrize("parents", [None, (-1, 0), (-1, -1, 1)])
def test_masks_after_a_rejected_draft_are_of_the_verified_text(constraint, spell, parents):
    """A rejected `ae` and the verified `be` end in the same lexeme, and continue differently."""
    spec = {"grammar": 'start: "a" E "d" | "b" E "n"\nE: /e+/'}  # `ed` and `en` are tokens
    here, fresh = constraint(**spec), constraint(**spec)
    draft = spell("bae"[-len(parents or "ae") :])
    drafted = here.extend(draft, 8) if parents is None else here.prune(draft, parents, 8)
    assert drafted.token_ids == tuple(draft)
    for each in (here, fresh):
        each.follow([*PROMPT, *spell("be")])
    assert allowed(here.extend((), 8).masks[0]) == allowed(fresh.extend((), 8).masks[0])


def test_verified_tokens_advance_the_grammar(constraint, spell):
    here = constraint(regex="a{2}b{2}|b{9}")
    here.follow([*PROMPT, *spell("a")])
    here.follow([*PROMPT, *spell("aab")])
    assert list(here.extend((), 3).token_ids) == spell("b")
    with pytest.raises(GrammarError):
        here.follow([*PROMPT, *spell("aabx")])


def test_a_sampled_draft_is_not_cut(constraint, spell):
    drafted = constraint(regex="[ab]{9}").along(spell("axa"))
    assert list(drafted.token_ids) == spell("axa")
    assert len(drafted.masks) == 4
    assert spell("x")[0] not in allowed(drafted.masks[1])
    assert (drafted.masks[2:] == -1).all()


def test_end_tokens_are_masked_before_min_tokens_unless_forced(constraint, spell):
    here = constraint(min_tokens=3, regex="a{0,4}")
    masks = here.extend(spell("aaaa"), 8).masks
    assert [bool(allowed(mask) & EOS) for mask in masks] == [False, False, False, True, True]
    here = constraint(min_tokens=9, regex="a{0,2}")
    masks = here.extend(spell("aa"), 8).masks
    assert allowed(masks[1]) == set(spell("a"))
    assert allowed(masks[2]) == EOS
    assert not allowed(here.along(spell("a")).masks[1]) & EOS
