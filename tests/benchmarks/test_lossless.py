from benchmarks.lossless import Configuration, Outcome, _print_events
from benchmarks.ties import (
    TAU,
    Candidates,
    Difference,
    Reference,
    argmax_differences,
    first_difference,
)
from specdec.types.reports.stats import SpeculationStats

CLEAR = Candidates(token_ids=(1, 2, 3), scores=(5.0, 3.0, 1.0))
TIED = Candidates(token_ids=(1, 2, 3), scores=(5.0, 5.0 - TAU / 2, 1.0))
REFERENCE = Reference("some/1", token_ids=(1, 1, 1), candidates=(CLEAR, TIED, CLEAR))


def outcome(*differences, drafts_as_asked=True):
    return Outcome(
        name="a test",
        num_outputs=40,
        num_identical=40 - len(differences),
        differences=differences,
        speculation=SpeculationStats(),
        drafts_as_asked=drafts_as_asked,
        seconds=0.0,
    )


def test_equal_tokens_have_no_difference():
    assert first_difference(REFERENCE, [1, 1, 1]) is None


def test_a_token_close_to_the_best_is_a_tie_for_any_continuation():
    difference = first_difference(REFERENCE, [1, 2, 9, 9])

    assert difference is not None
    assert difference.is_tie
    assert (difference.position, difference.expected, difference.got) == (1, 1, 2)
    assert difference.gap == TIED.scores[0] - TIED.scores[1]


def test_a_token_far_from_the_best_is_wrong_even_where_two_others_tie():
    for token_ids in ([2, 1, 1], [1, 3, 1], [1, 1, 2]):
        difference = first_difference(REFERENCE, token_ids)

        assert difference is not None
        assert not difference.is_tie
        assert difference.gap is not None
        assert difference.gap > TAU


def test_a_token_that_is_not_among_the_candidates_is_wrong():
    tied = Candidates(token_ids=(1, 2), scores=(5.0, 5.0 - TAU / 2))

    difference = first_difference(Reference("some/1", (1,), (tied,)), [9])

    assert difference is not None
    assert not difference.is_tie


def test_a_gap_of_tau_is_not_a_tie():
    candidates = Candidates(token_ids=(1, 2), scores=(TAU, 0.0))

    assert not candidates.is_tied(2)
    assert candidates.is_tied(1)


def test_a_truncated_or_longer_output_is_wrong():
    short = first_difference(REFERENCE, [1, 1])
    long = first_difference(REFERENCE, [1, 1, 1, 4])

    assert short == Difference("some/1", 2, expected=1, got=None, gap=None, is_tie=False)
    assert long == Difference("some/1", 3, expected=None, got=4, gap=None, is_tie=False)


def test_every_token_that_is_not_the_best_by_the_reference_itself_is_found():
    reference = Reference("some/1", token_ids=(1, 2, 3), candidates=(CLEAR, TIED, CLEAR))

    found = argmax_differences(reference)

    assert [(each.position, each.is_tie) for each in found] == [(1, True), (2, False)]


def test_an_outcome_passes_with_few_ties_only():
    tie = Difference("some/1", 1, 1, 2, 1e-5, is_tie=True)
    wrong = Difference("some/1", 1, 1, 3, 4.0, is_tie=False)

    assert outcome().passed
    assert outcome(tie, tie).passed
    assert not outcome(tie, tie, tie).passed
    assert not outcome(wrong).passed


def test_an_outcome_fails_if_drafts_do_not_match_the_configuration():
    assert not outcome(drafts_as_asked=False).passed


def test_the_name_of_a_configuration():
    configuration = Configuration("ngram", 0, 2, num_draft_tokens=3, num_streams=16)

    assert str(configuration) == "temperature 0, tp 2, speculation ngram 3, 16 streams"


def test_an_event_that_did_not_occur_fails(capsys):
    _print_events({"num_preemptions": 0, "prefill_chunks": 19})
    _print_events({"num_preemptions": 2, "prefill_chunks": 19})
    failed, passed = capsys.readouterr().out.splitlines()
    assert failed == (
        "FAIL   events: 0 num_preemptions, 19 prefill_chunks; more prompts or tokens are needed "
        "for num_preemptions"
    )
    assert passed == "pass   events: 2 num_preemptions, 19 prefill_chunks"
