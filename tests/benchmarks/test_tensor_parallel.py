from benchmarks.step_bench import Shape
from benchmarks.tensor_parallel import GLOO, ONE_PROCESS, SHARED_MEMORY, bars, step_ratio

TIMES = {
    ONE_PROCESS: [0.010, 0.020, 0.010],
    SHARED_MEMORY: [0.011, 0.020, 0.012],
    GLOO: [0.030, 0.030, 0.030],
}


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
    found = step_ratio("fp32", Shape(2, 3), TIMES)
    assert (found.num_seqs, found.num_rows) == (2, 8)
    assert found.median_ms == {ONE_PROCESS: 10.0, SHARED_MEMORY: 12.0, GLOO: 30.0}
    assert {way: round(ratio, 9) for way, ratio in found.ratio.items()} == {
        SHARED_MEMORY: 1.1,
        GLOO: 3.0,
    }


def test_the_bar_applies_to_shared_memory():
    slow = {**TIMES, SHARED_MEMORY: [0.012, 0.024, 0.012]}
    found = bars([step_ratio("fp32", Shape(1), TIMES), step_ratio("fp32", Shape(1, 7), slow)])
    assert [bar.is_met for bar in found] == [True, False]
    assert "fp32, 8 rows of 1" in found[1].name
