"""Replay on recordings whose drafts can be counted by hand."""

import json
from dataclasses import asdict

import pytest

from benchmarks.cost_table import CostTable, read_costs
from benchmarks.draft_lengths import compare_lengths
from benchmarks.drafting_report import Row, bars, length_bars
from benchmarks.machine import describe_machine
from benchmarks.recordings import Recording, load, save
from benchmarks.replay import Replay
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


def recording(prompt, output, agrees=()):
    return Recording(
        "some/1", "some", tuple(prompt), tuple(output), agrees or (True,) * len(output)
    )


def test_ngram_on_a_text_that_repeats(tokenizer):
    replay = Replay(SpeculativeConfig.of("ngram"), 3, tokenizer)
    tally = replay.run([recording([1, 2, 3, 4, 5, 6, 9, 1], [2, 3, 4, 5, 6, 7, 8, 10])])
    # After 1 2 the draft 3 4 5 is accepted, with bonus token 6. Then no draft: 9 followed 5 6.
    assert tally.speculation.num_drafts == 2
    assert tally.speculation.num_draft_tokens == 3 + 2
    assert tally.speculation.num_accepted_tokens == 3
    assert (tally.num_steps, tally.num_tokens) == (1 + 3, 7)
    assert tally.num_model_drafts == 0


def test_a_recorded_draft_is_accepted_up_to_the_first_disagreement(tokenizer):
    agrees = (True, True, True, False, True, True, True)
    replay = Replay(SpeculativeConfig.of("draft_model"), 3, tokenizer)
    tally = replay.run([recording([1], [2, 3, 4, 5, 6, 7, 8], agrees)])
    # Of 3 4 5 two are accepted, 5 is the target's; of 6 7 two, and one is left for the target.
    assert tally.speculation.num_draft_tokens == 3 + 2
    assert tally.speculation.num_accepted_tokens == 2 + 2
    assert (tally.num_steps, tally.num_model_drafts) == (2, 2)


def test_the_draft_model_does_not_draft_where_a_lookup_comes_first(tokenizer):
    replay = Replay(SpeculativeConfig.of("draft_model", first="ngram"), 3, tokenizer)
    tally = replay.run([recording([1, 2, 3, 4, 5, 6, 9, 1], [2, 3, 4, 5, 6, 7, 8, 10])])
    assert tally.num_model_drafts == tally.num_steps - 2


def test_suffix_decoding_uses_the_outputs_of_the_first_pass(tokenizer):
    replay = Replay(SpeculativeConfig.of("suffix"), 3, tokenizer)
    once = [recording([1], range(10, 40))]
    first, second = replay.run(once), replay.run(once)
    assert first.tokens_per_step == 1
    assert second.tokens_per_step > 3


def test_recordings_are_read_as_written(tmp_path):
    recordings = [recording([1, 2], [3]), recording([4], [5, 6], (False, True))]
    save(recordings, tmp_path / "new" / "recordings.json")
    assert load(tmp_path / "new" / "recordings.json") == recordings


def rows(ngram, suffix):
    return [
        Row(method, 7, suite, number, length, 0.5, length, 1.0, 0.0, 9.0)
        for method, length in (("ngram", ngram), ("suffix", suffix))
        for suite in ("edit", "humaneval")
        for number in (1, 2)
    ]


def test_bars():
    assert all(bar.is_met for bar in bars(rows(ngram=2.1, suffix=2.2)))
    missed = [bar.name for bar in bars(rows(ngram=1.95, suffix=1.9)) if not bar.is_met]
    assert missed == [
        "ngram on edit, mean acceptance length",
        "suffix above ngram on edit, second pass, tokens a step",
        "suffix above ngram on humaneval, second pass, tokens a step",
    ]


def costs(verify_s=(0.02, 0.021, 0.022, 0.023, 0.024, 0.025, 0.026, 0.027, 0.028)):
    return CostTable(describe_machine(), 2, verify_s, tuple(0.005 * count for count in range(9)))


def test_steps_cost_what_the_table_lists(tokenizer):
    agrees = (True, True, True, False, True, True, True)
    replay = Replay(SpeculativeConfig.of("draft_model"), 3, tokenizer)
    tally = replay.run([recording([1], [2, 3, 4, 5, 6, 7, 8], agrees)])
    assert tally.kinds == {(3, 3): 1, (2, 2): 1}
    assert tally.seconds(costs()) == pytest.approx(0.023 + 0.015 + 0.022 + 0.010)


def test_replay_uses_adaptive_lengths_like_the_engine(tokenizer):
    config = SpeculativeConfig.of("draft_model", adaptive_length=True)
    tally = Replay(config, 3, tokenizer).run([recording([1], range(2, 40))])
    assert list(tally.kinds)[:3] == [(3, 3), (6, 6), (8, 8)]


def test_adaptive_lengths_beat_a_length_that_suits_half_of_the_texts(tokenizer):
    recordings = [recording([1], [1] * 40, (agrees,) * 40) for agrees in (True, False)]
    [row] = compare_lengths(
        {"draft_model": SpeculativeConfig.of("draft_model")}, [recordings], tokenizer, costs()
    )
    assert len(row.tokens_per_s) == 8
    assert row.tokens_per_s[row.best - 1] == max(row.tokens_per_s)
    assert row.share > 1
    assert all(bar.is_met for bar in length_bars([row]))


def test_costs_are_read_from_a_report(tmp_path):
    assert read_costs(tmp_path / "none.json") is None
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"costs": asdict(costs())}))
    assert read_costs(path) == costs()
    path.write_text("{}")
    assert read_costs(path) is None
