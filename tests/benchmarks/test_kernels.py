import torch

from benchmarks.kernels import measure
from benchmarks.matrix_contenders import CONTENDERS
from tests.specdec.threads import num_threads


def test_the_lower_bound_of_each_contender_depends_on_its_bytes():
    names = ("float32", "int8", "torch float32, x @ W")
    with num_threads(1), torch.inference_mode():
        figures = measure([(48, 64), (16, 48)], 3, 2, names, 1)
    assert [figure.contender for figure in figures] == list(names)
    full, int8, torch_s = figures
    assert full.floor_ms == torch_s.floor_ms == 4 * int8.floor_ms > 0
    assert all(0 < figure.fastest_ms <= figure.median_ms for figure in figures)


def test_every_contender_runs():
    for contender in CONTENDERS.values():
        with torch.inference_mode():
            contender([(48, 64)], 3).run()
