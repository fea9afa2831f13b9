"""Replay on recordings whose drafts can be counted by hand."""

import pytest

from benchmarks.precisions import PRECISIONS
from benchmarks.prompts import BenchmarkPrompt
from benchmarks.recordings import Recording, TextScorer, load, record, save
from benchmarks.replay import METHODS, Replay, replay_all, table
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


def test_recorded_answers_are_greedy(tiny_model_dir):
    """The model itself would draft each of their tokens, and its int8 copy most of them."""
    prompts = [BenchmarkPrompt("a", "some", (5, 6, 7, 5)), BenchmarkPrompt("b", "some", (9, 8))]
    found = record(tiny_model_dir, prompts, 16)
    assert [each.prompt_token_ids for each in found] == [each.token_ids for each in prompts]
    target = TextScorer(tiny_model_dir, PRECISIONS["fp32"])
    for each in found:
        assert all(target.agrees(each.prompt_token_ids, each.output_token_ids))
        assert len(each.draft_agrees) == len(each.output_token_ids) <= 16
    agrees = [each for one in found for each in one.draft_agrees]
    assert sum(agrees) > len(agrees) / 2


def test_the_table_has_a_row_for_each_method(tokenizer):
    texts = [recording([1, 2, 3, 1], [2, 3, 1, 2, 3, 1, 2])]
    rows = replay_all([texts, texts], 3, tokenizer)
    assert len(rows) == 2 * len(METHODS)
    lines = table(rows, 2).splitlines()
    assert lines[0] == "| pass 2 | some |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in METHODS]
