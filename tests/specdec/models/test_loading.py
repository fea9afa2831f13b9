# Modules: specdec.models.loading, specdec.models.config.families.native_recurrence
"""Selection of the kernels of a model's ranks."""

import logging
from dataclasses import dataclass

import pytest

from specdec.kernels import backend
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.families import native_recurrence
from specdec.models.config.families.native_recurrence import kernels_of_hybrids, recurrence_fault
from specdec.models.config.recurrent import Recurrent, ShortConvolution
from specdec.models.cpu_decoder import NativeDecoder, NativeHybridDecoder
from specdec.types.errors import InvalidValueError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import load


def kinds_of(directory, size, kernels="auto"):
    return run_ranks(size, lambda group: type(load(directory, group, kernels=kernels)).__name__)


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_ranks_use_the_native_kernels_if_all_have_them(tiny_model_dir):
    assert kinds_of(tiny_model_dir, 2) == [NativeDecoder.__name__] * 2


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_use_torch_if_one_has_no_kernels(tiny_model_dir, monkeypatch, caplog, size):
    answers = [None, *[native_library()] * (size - 1)]
    monkeypatch.setattr(backend, "native_library", answers.pop)
    with caplog.at_level(logging.WARNING):
        assert kinds_of(tiny_model_dir, size) == ["CausalDecoder"] * size
    assert caplog.text.count("not all ranks have") == size - 1


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_recurrent_layers_run_by_torch_where_they_have_no_native_kernels(
    tmp_path, monkeypatch, caplog
):
    save_family(tmp_path, "lfm2-plain")
    assert kinds_of(tmp_path, 1) == [NativeHybridDecoder.__name__]
    assert kinds_of(tmp_path, 1, "torch") == ["HybridDecoder"]
    monkeypatch.setattr(native_recurrence, "_KERNEL_FIELDS", {Recurrent: {"layers", "kind"}})
    with caplog.at_level(logging.WARNING):
        assert kinds_of(tmp_path, 1) == ["HybridDecoder"]
    assert "layers of ShortConvolution have no native kernel" in caplog.text
    with pytest.raises(InvalidValueError, match="must be auto or torch"):
        load(tmp_path, TensorParallelGroup(), kernels="native")


def test_a_field_that_the_kernels_do_not_follow_needs_its_default():
    @dataclass(frozen=True)
    class Scaled(Recurrent):
        scale: float = 1.0

    kind = ShortConvolution(4, 3, has_bias=False)
    with pytest.MonkeyPatch.context() as patch:
        known = native_recurrence._KERNEL_FIELDS
        patch.setattr(native_recurrence, "_KERNEL_FIELDS", {**known, Scaled: known[Recurrent]})
        assert recurrence_fault(Scaled(frozenset({0}), kind)) is None
        found = Scaled(frozenset({0}), kind, scale=2.0)
        assert recurrence_fault(found) == "recurrent layers with scale"
        assert kernels_of_hybrids("auto", found) == "torch"
