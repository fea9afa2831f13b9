"""Tests of the comparison with the table of the peers' suites."""

import pytest

from tests.peers.suites import Result, Suite, suites

FILES = {"a": {"passed": 1, "not claimed": {"no beams": ["test_beam", "test_n[2]"]}}}
PASSED, FAILED = Result(True, ""), Result(False, "AssertionError")
EXPECTED = {"a::test_beam[1]": FAILED, "a::test_n[1]": PASSED, "a::test_n[2]": FAILED}


@pytest.fixture
def suite(tmp_path):
    return Suite("vllm", tmp_path, "1", "https://a", "0", FILES)


def test_results_that_the_table_has_are_no_differences(suite):
    assert suite.differences(EXPECTED) == []


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        ({"a::test_n[1]": FAILED}, ["a::test_n[1] fails: AssertionError", "a: 0 tests pass, 1"]),
        ({"a::test_beam[1]": PASSED}, ["a::test_beam[1] passes now", "a: 2 tests pass, 1"]),
        ({"a::test_new": PASSED}, ["a: 2 tests pass, 1"]),
    ],
)
def test_a_change_of_either_side_is_a_difference(suite, changed, differences):
    found = suite.differences({**EXPECTED, **changed})
    assert len(found) == len(differences)
    assert all(line.startswith(start) for line, start in zip(found, differences, strict=True))


def test_a_listed_test_that_is_gone_is_a_difference(suite):
    without = {name: each for name, each in EXPECTED.items() if name != "a::test_beam[1]"}
    assert suite.differences(without) == ["a::test_beam is not in vllm 1"]


def test_every_reason_of_the_table_lists_tests(tmp_path):
    headings = {"passed", "not claimed", "model too small", "not run"}
    for suite in suites(tmp_path):
        for file, entry in suite.files.items():
            assert entry.keys() <= headings, file
            assert all(
                tests for name in entry.keys() - {"passed"} for tests in entry[name].values()
            )
