"""Selection of the kernels of a model's ranks."""

import logging

import pytest

from specdec.kernels import backend
from specdec.kernels.cpu import native_library
from specdec.models.cpu_decoder import NativeDecoder
from tests.specdec.fakes import run_ranks
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
