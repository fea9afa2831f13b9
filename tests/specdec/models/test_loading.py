"""Which kernels the ranks of a model take."""

import logging

import pytest

from specdec.kernels.cpu import native_library
from specdec.models import loading
from specdec.models.cpu_decoder import NativeDecoder
from tests.specdec.fakes import run_ranks
from tests.specdec.models.passes import load


def kinds_of(directory, size, kernels="auto"):
    return run_ranks(size, lambda group: type(load(directory, group, kernels=kernels)).__name__)


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_ranks_take_the_native_kernels_where_all_have_them(tiny_model_dir):
    assert kinds_of(tiny_model_dir, 2) == [NativeDecoder.__name__] * 2


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_take_torch_s_where_one_has_none(tiny_model_dir, monkeypatch, caplog, size):
    answers = [None, *[native_library()] * (size - 1)]
    monkeypatch.setattr(loading, "native_library", answers.pop)
    with caplog.at_level(logging.WARNING):
        assert kinds_of(tiny_model_dir, size) == ["CausalDecoder"] * size
    assert caplog.text.count("not all have") == size - 1
