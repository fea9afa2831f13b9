"""Tests of the cache of earlier outputs: tenants, limits and complete eviction."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from specdec.speculation.proposers.suffix import OutputCache
from tests.specdec.speculation.proposers.test_suffix_tree import pieces

ALL = 1000
OUTPUTS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=12)),
    max_size=12,
)


@given(OUTPUTS, st.integers(0, 4), st.sampled_from([12, 40, 10_000]), st.integers(0, 9))
def test_evicted_outputs_leave_no_trace(outputs, max_outputs, max_nodes, at_once):
    cache, kept = OutputCache(5, max_outputs, max_nodes), []
    for tenant, output in outputs:
        cache.add(tenant, output)
        kept = [*kept, (tenant, output)] if output else kept
        cache.maintain(at_once)
        cache.check_integrity()
        assert cache.num_outputs <= max_outputs + 1
        assert cache.num_nodes <= max_nodes + 2, "more than one token beyond the bound"
    cache.maintain(ALL)
    cache.check_integrity()
    assert cache.num_outputs <= max_outputs
    assert cache.num_nodes <= max_nodes
    if not max_outputs or max_nodes < 10_000:
        return
    fresh = OutputCache(5, max_outputs)
    for tenant, output in kept[-max_outputs:]:
        fresh.add(tenant, output)
    fresh.maintain(ALL)
    for tenant in ("", "a", "b"):
        mine, new = cache.tree(tenant), fresh.tree(tenant)
        assert (mine is None) == (new is None)
        assert mine is None or pieces(mine) == pieces(new)


def test_the_oldest_output_of_any_tenant_is_evicted_first():
    cache = OutputCache(4, max_outputs=2)
    for tenant, token in (("a", 1), ("b", 2), ("b", 3)):
        cache.add(tenant, [token, token])
    cache.maintain(ALL)
    assert cache.tree("a") is None
    assert cache.tree("b").find(array("i", [2, 2])) is not None


def test_an_output_over_the_limit_evicts_no_other():
    cache = OutputCache(4, max_outputs=9, max_nodes=20)
    cache.add("a", [1, 2, 3])
    cache.add("a", list(range(11)))
    cache.maintain(ALL)
    assert cache.num_outputs == 1


def test_outputs_that_repeat_each_other_are_limited_by_their_tokens():
    """Their trees have few nodes, but each output keeps its text."""
    cache = OutputCache(4, max_outputs=ALL, max_nodes=20)
    for _ in range(30):
        cache.add("a", [1] * 5)
        cache.maintain(5)
        cache.check_integrity()
        assert cache.num_tokens + cache.num_pending_tokens <= 40
    cache.maintain(ALL)
    assert cache.num_outputs == 8
    assert cache.num_nodes < 20


def test_outputs_that_end_faster_than_they_are_inserted_do_not_pile_up():
    """Each step brings ten tokens, and inserts and evicts six."""
    cache = OutputCache(4, max_outputs=2, max_nodes=40)
    for step in range(50):
        cache.add("a", [step] * 10)
        cache.maintain(12)
        cache.check_integrity()
        assert cache.num_pending_tokens <= 40
    cache.maintain(ALL)
    assert cache.num_pending_tokens == 0
    assert cache.tree("a").find(array("i", [49, 49])) is not None, "the latest were dropped"


def test_the_text_of_an_evicted_output_is_freed():
    cache = OutputCache(4, max_outputs=1)
    for _ in range(3):
        cache.add("a", [1, 2, 3, 4, 5])
        cache.maintain(ALL)
        texts = {id(text) for text in cache.tree("a")._texts if len(text)}
        assert texts == {id(output.token_ids) for output in cache._outputs}


def test_maintain_adds_and_evicts_at_most_its_number_of_tokens():
    cache = OutputCache(4, max_outputs=1)
    cache.add("a", list(range(10)))
    cache.maintain(4)
    assert (cache.num_nodes, cache.num_outputs) == (4, 0)
    assert cache.tree("a").find(array("i", [3, 4, 5, 6])) is not None
    assert cache.tree("a").find(array("i", [4])) is None
    cache.maintain(6)
    assert cache.num_outputs == 1
    cache.add("b", [20])
    cache.maintain(5)  # adds one token, then evicts four of the ten
    assert cache.tree("b") is not None
    assert cache.num_nodes == 7
    cache.maintain(6)
    assert cache.tree("a") is None
