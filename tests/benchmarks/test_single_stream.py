"""Aims of the comparisons of one stream."""

from benchmarks import single_stream


def test_aims_of_single_streams():
    aims = {
        each.name: each.aim
        for each in single_stream.comparisons(
            ["edit", "gsm8k"], ["none", "ngram", "draft_model", "auto"]
        )
    }
    assert aims == {
        "ngram / none, edit": 1.3,
        "draft_model / none, edit": None,
        "auto / none, edit": 0.97,
        "ngram / none, gsm8k": None,
        "draft_model / none, gsm8k": None,
        "auto / none, gsm8k": 0.97,
    }
