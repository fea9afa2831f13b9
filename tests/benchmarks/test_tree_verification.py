"""The benchmark of trees on the tiny model."""

from benchmarks import tree_verification


def test_chain_and_tree_of_each_context_are_timed(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(tree_verification, "_CONTEXT_TOKENS", (8, 20))
    rows = tree_verification.measure(tiny_model_dir, "fp32", 6, num_rounds=2)
    assert [(row.num_context_tokens, row.num_nodes) for row in rows] == [(8, 6), (20, 6)]
    assert all(0 < row.chain_ms <= row.chain_median_ms for row in rows)
    assert all(0 < row.tree_ms <= row.tree_median_ms for row in rows)
    assert all(1 < row.depth < 6 for row in rows)
    [first, _] = tree_verification.bars(rows)
    assert first.figure == rows[0].tree_ms / rows[0].chain_ms
    assert first.is_met == (first.figure <= 1.1)
