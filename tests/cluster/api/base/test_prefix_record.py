"""Records of prefixes, up to the capacity of a cache."""

from cluster.api.base.prefix_record import PrefixRecord, work_tokens
from cluster.api.base.routing_hint import RoutingHint


def test_a_record_forgets_the_least_recent_prompts_from_their_ends():
    record = PrefixRecord(300)
    old, new = (RoutingHint.of((), text * 200, 64) for text in (b"old ", b"new "))
    record.add(old)
    assert record.matched_tokens(old) == 192
    record.add(new)
    assert record.matched_tokens(new) == 192
    assert record.matched_tokens(old) == 96
    record.limit(100)
    assert record.matched_tokens(new) == 96
    assert record.matched_tokens(old) == 0


def test_the_work_of_a_request_is_what_is_not_cached_and_the_answer():
    hint = RoutingHint.of((), b"x" * 400, 64)
    assert [work_tokens(hint, matched) for matched in (0, 32, 200)] == [164, 132, 64]
