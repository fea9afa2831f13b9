"""Tensors are read as the safetensors library reads them, and no header leads outside of them."""

import gc
import json
import struct
import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.models.weights import stored_tensors
from specdec.models.weights.pickled_tensors import DTYPES
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.models.weights.weight_files import read_headers
from specdec.types.errors import UnsupportedModelError

NUM_BYTES = 16
VALUES = {
    "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [3, 11]},
    "c": {"dtype": "F32", "shape": [], "data_offsets": [11, 15]},
    "d": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [15, 15]},
    "e": {"dtype": "BOOL", "shape": [1], "data_offsets": [15, 16]},
}


def write(path, num_bytes=NUM_BYTES, **changes):
    """Write a file in which most tensors begin at an odd position."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **VALUES, **changes}).encode()
    header += b" " * (len(header) % 2)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(num_bytes)))


def test_every_type_is_read_as_by_the_library(tmp_path):
    path, codes = tmp_path / "model.safetensors", torch.arange(96, dtype=torch.uint8) % 2
    kept = {name: codes.clone().view(dtype).view(4, -1) for name, dtype in DTYPES.items()}
    save_file(kept, path)
    expected, source = load_file(path), StoredTensors([path], tmp_path)
    assert {*source} == {*kept}
    for name, tensor in expected.items():
        whole, part = source.slice(name), source.slice(name, slice(1, 3), slice(0, 1))
        assert (source.dtype(name), whole.dtype, whole.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(part.view(torch.uint8), tensor[1:3, :1].clone().view(torch.uint8))


def test_tensors_may_begin_anywhere(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path)
    expected, source = load_file(path), StoredTensors([path], tmp_path)
    for name, tensor in expected.items():
        assert source.slice(name).shape == tensor.shape
        assert torch.equal(source.slice(name), tensor)


def test_a_file_is_mapped_again_after_some_bytes(tmp_path, monkeypatch):
    path, expected = tmp_path / "model.safetensors", torch.arange(24.0).view(6, 4)
    save_file({str(index): row for index, row in enumerate(expected)}, path)
    source, from_file = StoredTensors([path], tmp_path), Mock(wraps=torch.from_file)
    monkeypatch.setattr(stored_tensors, "_MOST_MAPPED_BYTES", 3 * 16)
    monkeypatch.setattr(torch, "from_file", from_file)
    assert torch.equal(torch.stack([source.slice(str(index)) for index in range(6)]), expected)
    assert from_file.call_count == 2


def test_a_file_that_has_become_shorter_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path)
    source = StoredTensors([path], tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors cannot be read"):
        source.slice("a")


@pytest.mark.parametrize("num_read", [0, 1])
def test_another_file_of_the_path_is_refused(tmp_path, monkeypatch, num_read):
    """It may have the same tensors at other positions."""
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, path)
    source = StoredTensors([path], tmp_path)
    monkeypatch.setattr(stored_tensors, "_MOST_MAPPED_BYTES", 1)
    for name in ["a"][:num_read]:
        assert torch.equal(source.slice(name), torch.ones(2))
    save_file({"b": torch.ones(2), "a": torch.zeros(2)}, other)
    other.rename(path)
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors has changed while it was"):
        source.slice("b")


def test_a_window_of_a_tensor_at_an_odd_position_is_copied_alone(tmp_path):
    path, columns = tmp_path / "model.safetensors", (slice(None), slice(1, 3))
    write(path, 47, e={"dtype": "F32", "shape": [2, 4], "data_offsets": [15, 47]})
    part = StoredTensors([path], tmp_path).slice("e", *columns)
    assert torch.equal(part, load_file(path)["e"][columns])
    assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"b": {**VALUES["b"], "data_offsets": [4, 12]}},
            "b has the bytes .* after the",
        ),
        ({"b": {**VALUES["b"], "data_offsets": [0, 8]}}, "b has the bytes"),
        (
            {"b": {**VALUES["b"], "data_offsets": [3, 12]}},
            r"b has .* as F32 \[2, 1\] after",
        ),
        ({"a": {**VALUES["a"], "data_offsets": [-1, 2]}}, "a has the bytes"),
        ({"a": {**VALUES["a"], "data_offsets": [0.0, 3]}}, "invalid safetensors header"),
        ({"a": {**VALUES["a"], "data_offsets": [0]}}, "invalid safetensors header"),
        ({"a": {**VALUES["a"], "data_offsets": ["0", 3]}}, "invalid safetensors header"),
        (
            {"a": {**VALUES["a"], "data_offsets": [0, 10**4300 - 1]}},
            r"a has data_offsets beyond 2\^63",
        ),
        ({"a": {**VALUES["a"], "dtype": "U7"}}, "a has the unknown type 'U7'; known: F64, "),
        ({"a": {**VALUES["a"], "dtype": "F4"}}, "a has the bytes .* as F4"),
        ({"a": {**VALUES["a"], "shape": [-3]}}, "a has the invalid shape"),
        ({"a": {**VALUES["a"], "shape": [True]}}, "a has the invalid shape"),
        ({"a": {**VALUES["a"], "shape": [1 << 63]}}, "a has the invalid shape"),
        ({"a": {**VALUES["a"], "shape": [1] * 65}}, "a has the invalid shape"),
        ({"a": {**VALUES["a"], "shape": ["3" * 10_000] * 3}}, "a has the invalid shape"),
        ({"num_bytes": 15}, "not copied or downloaded completely"),
        ({"num_bytes": 17}, "bytes follow its last tensor"),
    ],
)
def test_headers_with_other_bytes_are_refused(tmp_path, changes, words):
    path = tmp_path / "model.safetensors"
    write(path, **changes)
    for read in (lambda: StoredTensors([path], tmp_path), lambda: read_headers([path])):
        with pytest.raises(UnsupportedModelError, match=words) as caught:
            read()
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_a_type_without_tensors_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, a={"dtype": "F4", "shape": [6], "data_offsets": [0, 3]})
    source = StoredTensors([path], tmp_path)
    assert source.slice("e").dtype == torch.bool
    with pytest.raises(UnsupportedModelError, match="a has type F4; torch has none"):
        source.slice("a")


def test_reading_keeps_no_memory(tmp_path):
    path, num_tensors = tmp_path / "model.safetensors", 100
    save_file({str(index): torch.ones(4, 8) for index in range(num_tensors)}, path)

    def read():
        source = StoredTensors([path], tmp_path)
        for name in source:
            source.slice(name, slice(1, 2))

    read()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        read()
    gc.collect()
    assert sys.getallocatedblocks() - before < 2 * num_tensors
