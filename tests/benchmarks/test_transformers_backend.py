"""The benchmark of transformers' code runs its three cases on a small model."""

import itertools

from benchmarks.transformers_backend import BackendBench, Round, bars, write_model


def test_a_round_measures_all_streams(tmp_path):
    write_model(tmp_path, num_layers=1, width=32)
    ticks = itertools.count()
    bench = BackendBench(tmp_path, 4, lambda: float(next(ticks)))
    assert bench.measure() == Round(4.0, 4.0, 64.0)
    bench.close()


def test_bars_compare_within_a_round():
    one, many = bars([Round(10.0, 9.5, 38.0), Round(20.0, 19.0, 57.0), Round(10.0, 8.0, 16.0)])
    assert (one.figure, many.figure) == (0.95, 3.0)
    assert one.is_met
    assert many.is_met
