"""Trees and chains of benchmarks.tree_verification on the tiny model."""

from benchmarks import tree_verification
from benchmarks.step_bench import PRECISIONS, StepBench


def test_chain_and_tree_of_each_context_have_equal_rows(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(tree_verification, "CONTEXT_TOKENS", (8, 20))
    bench = tree_verification.TreeBench(tiny_model_dir, PRECISIONS["fp32"], 6)
    assert 1 < bench.depth < 6
    steps = []
    monkeypatch.setattr(StepBench, "measure", lambda self, *shape: steps.append(shape))
    pairs = bench.pairs()
    assert list(pairs) == [8, 20]
    for chain, tree in pairs.values():
        chain()
        tree()
    assert steps[:2] == steps[2:]
    assert [step[:2] for step in steps[:2]] == [(1, 6)] * 2
    assert steps[0][2] is None
    assert len(steps[1][2]) == 6
    monkeypatch.undo()
    chain, tree = pairs[20]
    assert chain().step_s > 0
    assert tree().step_s > 0
