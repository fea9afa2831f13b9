from specdec.types.stats import AcceptanceByPosition, EngineCounters, SpeculationStats


def test_acceptance_by_position_of_drafts_of_different_lengths():
    by_position = AcceptanceByPosition()
    assert by_position.counts == ()
    for num_draft_tokens, num_accepted_tokens in [(3, 2), (0, 0), (1, 1), (4, 0), (4, 4)]:
        by_position.record(num_draft_tokens, num_accepted_tokens)
    assert by_position.counts == (3, 2, 1, 1)
    assert by_position.drafted == (4, 3, 3, 2)


def test_a_draft_counts_in_all_and_for_what_made_it():
    counters = EngineCounters()
    for drafter, drafted, accepted in [("ngram", 3, 2), ("draft_model", 2, 2), ("suffix", 0, 0)]:
        counters.record_draft(drafter, drafted, accepted)
    assert counters.speculation == SpeculationStats(2, 5, 4)
    assert counters.accepted_by_position.counts == (2, 2, 0)
    assert {name: each.counts for name, each in counters.by_method.items()} == {
        "ngram": (1, 1, 0),
        "draft_model": (1, 1),
    }
