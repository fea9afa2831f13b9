"""A small run of the comparison of random requests, and one of an engine with a fault."""

import json

from benchmarks.lossless_requests import main
from specdec.sampling.token_history import TokenHistory
from tests.specdec.random_comparison import Comparison, reduced
from tests.specdec.random_requests import random_requests
from tests.specdec.random_settings import RandomSettings

ARGUMENTS = "--seed 19 --settings 1 --requests 8 --method draft_model"


def run(capsys):
    """Return the exit status, the lines before the last, and the report in that."""
    status = main(ARGUMENTS.split())
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


def test_no_request_differs(capsys):
    status, [line], report = run(capsys)
    assert status == 0
    assert line.endswith("0 of 8 requests differ")
    assert (report["requests"], report["differing"], report["refused_settings"]) == (8, 0, 0)
    assert report["num_accepted_tokens"] > 0


def test_penalties_that_ignore_drafted_tokens_are_found(capsys, monkeypatch):
    follow = TokenHistory.follow

    def without_drafts(history, start, token_ids, *, is_end):
        if start < len(history):
            follow(history, start, token_ids, is_end=is_end)

    monkeypatch.setattr(TokenHistory, "follow", without_drafts)
    status, lines, report = run(capsys)
    assert status == 1
    assert report["differing"] > 0
    assert any(line.startswith("  request 1: choice 0: token_ids [") for line in lines)
    assert "  repeat with --seed 19 --first 0 --settings 1" in lines


def test_a_comparison_is_reduced_to_what_differs():
    settings = RandomSettings(
        "llama", "ngram", {}, {"block_size": 1, "max_num_seqs": 2}, {"method": "ngram"}, False
    )
    requests = random_requests("19/0", 20)
    wanted, index = requests[3], 9
    [key, *_] = requests[index].params

    def differs(comparison):
        *others, last = comparison.requests
        return (
            wanted in others and key in last.params and "block_size" in comparison.settings.limits
        )

    least = reduced(Comparison(settings, requests), index, differs)
    assert least.settings.limits == {"block_size": 1}
    assert least.requests[0] == wanted
    assert [each.params.keys() for each in least.requests[1:]] == [{key}]
