"""What is asked: lengths, prefixes, and what one run may know of another."""

from functools import partial

import pytest

from cluster.cli.bench.questions import PromptFile, RandomWords


def words(question):
    return question.prompt.split()


def test_a_file_is_asked_in_its_order_and_again_from_the_first():
    asked = PromptFile(["a", "b"], max_tokens=9).questions(3, run=0)
    assert [(each.prompt, each.max_tokens) for each in asked] == [("a", 9), ("b", 9), ("a", 9)]
    assert len({each.cache_salt for each in asked}) == 1


@pytest.mark.parametrize("make", [partial(PromptFile, ["a"], 9), partial(RandomWords, 5, 9)])
def test_what_a_run_has_cached_is_for_it_alone(make):
    """Another run, of this program or of a later one, may say the same words."""
    source = make()
    salts = [{each.cache_salt for each in source.questions(3, run)} for run in (0, 1, 0)]
    assert [len(each) for each in salts] == [1, 1, 1]
    assert len(set.union(*salts)) == 3
    assert all(salts[0])
    assert make(with_cache_salt=False).questions(1, 0)[0].cache_salt == ""


def test_random_words_are_as_many_as_asked_for():
    for each in RandomWords(12, 5).questions(20, 0):
        assert (len(words(each)), each.max_tokens) == (12, 5)


def test_lengths_spread_over_their_range_and_no_further():
    asked = RandomWords(10, 100, range_ratio=0.5).questions(400, 0)
    inputs, outputs = {len(words(each)) for each in asked}, {each.max_tokens for each in asked}
    assert inputs == set(range(5, 16))  # each missing with odds of (10/11)^400 = 3e-17
    assert (min(outputs) >= 50, max(outputs) <= 150, len(outputs) > 80) == (True, True, True)


def test_a_prefix_is_shared_and_the_rest_is_not():
    asked = RandomWords(20, 5, prefix_len=8).questions(10, 0)
    assert len({tuple(words(each)[:8]) for each in asked}) == 1
    assert len({tuple(words(each)[8:]) for each in asked}) == 10
    assert {len(words(each)) for each in asked} == {28}


def test_the_seed_and_the_run_fix_the_words():
    source = RandomWords(20, 5, seed=1)
    first = list(map(words, source.questions(3, 0)))
    assert first == list(map(words, source.questions(3, 0)))
    assert first != list(map(words, source.questions(3, 1)))
    assert first != list(map(words, RandomWords(20, 5, seed=2).questions(3, 0)))
