"""Keys of speculative_config for draft trees."""

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import read_speculation
from specdec.types.errors import InvalidValueError

MEDUSA = {"method": "medusa", "model": "./a"}


CHOICES = [[0], [0, 0], [1], [2], [0, 1]]


def test_the_number_of_medusa_choices_is_that_of_a_tree():
    read = read_speculation({**MEDUSA, "medusa_choices": CHOICES})
    assert read.num_draft_tree_tokens == 5
    assert read.head.tree_choices == ((0,), (0, 0), (1,), (2,), (0, 1))
    assert SpeculativeConfig.of(**read.to_mapping()) == read
    assert read_speculation({"method": "eagle3", "model": "./a"}).head.tree_choices == ()


MC_SIM_7B_63 = """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40
    21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90
    060 0001 16 070
"""


"""The list of that name in medusa/model/medusa_choices.py of github.com/FasterDecoding/Medusa, each
digit a rank."""


def test_published_choices_are_given_as_a_list():
    choices = [list(map(int, path)) for path in MC_SIM_7B_63.split()]
    keys = {"medusa_choices": choices}
    with pytest.raises(InvalidValueError, match="num_speculative_tokens is 3; it must be at lea"):
        read_speculation({**MEDUSA, **keys, "num_speculative_tokens": 3})
    read = read_speculation({"model": "./a", **keys})
    assert read.head.name == "medusa"
    assert read.num_draft_tree_tokens == len(read.head.tree_choices) == 63
    assert read.num_speculative_tokens == 4
    assert SpeculativeConfig.of(**read.to_mapping()) == read


def test_trees_of_drafts_need_a_method_that_drafts_them():
    read = read_speculation({"method": "suffix", "num_draft_tree_tokens": 16})
    assert read.num_draft_tree_tokens == 16
    mapping = {"method": "draft_model", "first": "ngram", "num_draft_tree_tokens": 8}
    assert read_speculation(mapping).num_draft_tree_tokens == 8


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"method": "lookahead", "num_draft_tree_tokens": 8}, "first or fallback is ngram or suff"),
        ({"num_draft_tree_tokens": 3}, "above num_speculative_tokens"),
        ({"num_draft_tree_tokens": 65}, "at most 64"),
        ({"num_draft_tree_tokens": -1}, "above num_speculative_tokens"),
        (
            {"num_draft_tree_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
            "0 with policy table",
        ),
        ({"num_draft_tree_tokens": 8, "batch_budget": True}, "0 with batch_budget"),
        ({**MEDUSA, "medusa_choices": [[0], [0]]}, r"choices is \[0\]; it must be a path"),
        (
            {**MEDUSA, "medusa_choices": [[0, 1]]},
            r"choices is \[0, 1\]; it must be a path",
        ),
        ({**MEDUSA, "medusa_choices": [[0], [[1]]]}, r"medusa_choices\[1\]\[0\] is \[1\]"),
        ({**MEDUSA, "medusa_choices": [0]}, r"medusa_choices\[0\] is 0; it must be a list"),
        ({**MEDUSA, "medusa_choices": [[i] for i in range(65)]}, "at most 64 paths"),
        (
            {**MEDUSA, "medusa_choices": [[0], [0, 0]]},
            r"choices is \[\[0\], \[0, 0\]\]; it must be more than num_speculative_tokens \(2\)",
        ),
        (
            {**MEDUSA, "medusa_choices": CHOICES, "num_draft_tree_tokens": 9},
            "num_draft_tree_tokens is 9; it must be left out or 5, the number of medusa_choices",
        ),
        (
            {**MEDUSA, "medusa_choices": CHOICES, "num_speculative_tokens": 1},
            "num_speculative_tokens is 1; it must be at least 2, the length of the longest path",
        ),
        ({"method": "suffix", "medusa_choices": CHOICES}, "unless method, first or fallback is me"),
    ],
)
def test_wrong_sizes_of_trees(mapping, message):
    with pytest.raises(InvalidValueError, match=message):
        read_speculation(mapping)
