"""Headers of GGUF files: whole, cut, invalid, and split over several files."""

import struct

import gguf
import numpy as np
import pytest

from specdec.models import resolve as models_resolve
from specdec.models.gguf.header import part_paths, read_header
from specdec.types.errors import UnsupportedModelError


def write(path, tensors=("a",), **keys):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name in tensors:
        writer.add_tensor(name, np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(directory, **changes):
    """Write three parts, whose tensors are a, b and c; return the first."""
    for index, name in enumerate("abc"):
        keys = {"split__no": index, "split__count": 3, "split__tensors__count": 3, **changes}
        write(directory / f"m-{index + 1:05}-of-00003.gguf", (name,), **keys)
    return directory / "m-00001-of-00003.gguf"


def test_values_of_every_type_and_places_of_tensors(tmp_path):
    found = read_header(write(tmp_path / "m.gguf", ("a", "b"), text="é", flag=True, n=-3, x=0.5))
    assert found.architecture == "llama"
    keys = {key: found.metadata[key] for key in ("text", "flag", "n", "x")}
    assert keys == {"text": "é", "flag": True, "n": -3, "x": 0.5}
    data = found.path.read_bytes()
    for tensor in found.tensors.values():
        assert tensor.shape == (2, 3)
        values = np.frombuffer(data, np.float32, 6, tensor.offset)
        assert values.tolist() == list(range(6))


@pytest.mark.parametrize("strings", [["a", "bc"], [1, 2, 3], [True, False]])
def test_arrays(tmp_path, strings):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("x", strings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_header(tmp_path / "m.gguf").metadata["x"] == strings


def test_a_file_that_is_cut_is_refused_at_every_length(tmp_path):
    whole = write(tmp_path / "m.gguf", text="x").read_bytes()
    header = whole.index(b"a", len(whole) // 3)
    for length in range(header):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(UnsupportedModelError, match="no whole GGUF file"):
            read_header(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGML" + bytes(20), "begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "tensors; limit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "keys; limit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**50), "ends within"),
        (b"GGUF" + struct.pack("<IQQQI", 3, 0, 1, 0, 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 4, 2**60), "GGUF file"),
        (b"GGUF" + struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 9, 1), "elements of the type 9"),
        (b"GGUF" + struct.pack("<IQQQI", 3, 1, 0, 0, 99), "99 dimensions"),
        (b"GGUF" + struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 0, 10**7 + 1), "an array; limit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<QIb", 0, 1, 0) * 2, "two keys"),
    ],
)
def test_headers_that_are_not_valid_are_one_clear_error(tmp_path, content, named):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=named):
        read_header(tmp_path / "m.gguf")


def test_the_parts_of_a_split_file_are_one_model(tmp_path):
    found = read_header(split(tmp_path))
    assert {name: each.path.name[:7] for name, each in found.tensors.items()} == {
        "a": "m-00001",
        "b": "m-00002",
        "c": "m-00003",
    }


def test_a_missing_part_is_named(tmp_path):
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(UnsupportedModelError, match=r"m-00002-of-00003\.gguf is missing"):
        read_header(first)


def test_another_part_than_the_first_names_it(tmp_path):
    split(tmp_path)
    with pytest.raises(UnsupportedModelError, match="the first part, m-00001"):
        read_header(tmp_path / "m-00002-of-00003.gguf")


def test_a_part_under_another_name_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="its name must be"):
        read_header(split(tmp_path).rename(tmp_path / "m.gguf"))


def test_parts_of_different_files_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"3 tensors, and split\.tensors\.count is 4"):
        read_header(split(tmp_path, split__tensors__count=4))


def test_every_part_is_in_the_key_of_the_cache(tmp_path):
    first = split(tmp_path)
    assert len(part_paths(first)) == 3
    before = models_resolve._identity(first)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    assert models_resolve._identity(first) != before
