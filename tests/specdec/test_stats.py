from specdec.stats import AcceptanceByPosition


def test_acceptance_by_position_of_drafts_of_different_lengths():
    by_position = AcceptanceByPosition()
    assert by_position.counts == ()
    for num_draft_tokens, num_accepted_tokens in [(3, 2), (0, 0), (1, 1), (4, 0), (4, 4)]:
        by_position.record(num_draft_tokens, num_accepted_tokens)
    assert by_position.counts == (3, 2, 1, 1)
    assert by_position.drafted == (4, 3, 3, 2)
