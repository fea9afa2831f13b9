# Modules: specdec.kernels.cpu.compiler
"""Kernels of a wheel: which of them a processor runs, and what happens where none fits."""

import ctypes
import os
import platform
import shutil

import pytest

from specdec.kernels.cpu import build
from specdec.kernels.cpu.build import BuildError, find_library
from specdec.kernels.cpu.compiler import compile_library, find_compiler, run
from specdec.kernels.cpu.variants import (
    STATIC_FLAGS,
    VARIANTS,
    compiler_flags,
    fitting_libraries,
    source_digest,
)

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'
X86 = VARIANTS["x86_64"]
BY_NAME = {each.name: each for each in X86}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE % 42)
    return folder


def names_of(tmp_path, source, features, machine="x86_64"):
    """Return the fitting variants of a wheel that has all."""
    for each in X86:
        (tmp_path / each.library_name(source_digest(source))).touch()
    found = fitting_libraries(tmp_path, source, machine, features)
    return [path.stem.split("-", 2)[2] for path in found]


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_processor_runs_its_variant_first_and_then_lesser_ones(tmp_path, source, name):
    found = names_of(tmp_path, source, {*BY_NAME[name].features, "sse2"})
    assert found[0] == name
    assert found[-1] == "v3"
    assert all(BY_NAME[each].features <= BY_NAME[name].features for each in found)


def test_a_processor_without_a_feature_skips_the_variants_that_need_it(tmp_path, source):
    features = BY_NAME["v4-bf16"].features
    assert names_of(tmp_path, source, features - {"avx512_vnni"}) == ["v4", "v3"]
    assert names_of(tmp_path, source, features - {"avx512vl"}) == ["v3"]
    assert names_of(tmp_path, source, features - {"avx2"}) == []
    assert names_of(tmp_path, source, features, machine="aarch64") == []


@pytest.mark.parametrize("changed", ["source", "name"])
def test_kernels_of_other_sources_do_not_fit(tmp_path, source, changed):
    before = source_digest(source)
    if changed == "source":
        (source / "answer.cpp").write_text(SOURCE % 43)
    else:
        (source / "answer.cpp").rename(source / "other.cpp")
    assert source_digest(source) != before


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="has no variants yet")


def precompile(directory, source, variant="v3"):
    directory.mkdir()
    library = directory / BY_NAME[variant].library_name(source_digest(source))
    flags = compiler_flags(*BY_NAME[variant].march)
    compile_library(find_compiler(), source, library, flags, STATIC_FLAGS)
    return library


@needs_x86
def test_kernels_of_the_wheel_need_no_compiler(tmp_path, source, monkeypatch):
    library = precompile(tmp_path / "precompiled", source)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = find_library(source, tmp_path / "precompiled", tmp_path / "cache")
    assert found == library
    assert ctypes.CDLL(str(found)).answer() == 42
    (source / "answer.cpp").write_text(SOURCE % 43)
    with pytest.raises(BuildError, match="install"):
        find_library(source, tmp_path / "precompiled", tmp_path / "cache")


@needs_x86
def test_kernels_that_cannot_be_loaded_are_compiled_here(tmp_path, source, caplog):
    library = precompile(tmp_path / "precompiled", source)
    library.write_bytes(b"no library")
    found = find_library(source, tmp_path / "precompiled", tmp_path / "cache")
    assert found.parent == tmp_path / "cache"
    assert ctypes.CDLL(str(found)).answer() == 42
    assert "precompiled kernels cannot be loaded" in caplog.text


ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")


CHAIN = """using Floats = float __attribute__((vector_size(32)));
Floats dot(const Floats* a, const Floats* b, long count) {
  Floats sum = {};
  for (long index = 0; index < count; ++index) sum += a[index] * b[index];
  return sum;
}
"""


@needs_x86
def test_chains_of_sums_are_fused_whatever_the_tuning(tmp_path):
    """Zen 3's tuning would round products before they are added, or not, by the code around."""
    (tmp_path / "chain.cpp").write_text(CHAIN)
    flags = compiler_flags(*BY_NAME["v3"].march, "-mtune=znver3")
    assembly = run([find_compiler(), *flags, "-S", "-o", "-", str(tmp_path / "chain.cpp")])
    assert "vfmadd" in assembly
    assert "vmulps" not in assembly


@pytest.mark.slow
@pytest.mark.skipif(ARM_COMPILER is None, reason="needs g++-aarch64-linux-gnu")
def test_the_sources_compile_for_arm64(tmp_path):
    """Compile as an image for arm64 does at its first start, whose compiler is GCC 12."""
    flags = (*compiler_flags("-march=armv8.2-a"), "-O0", "-Werror")
    compile_library(ARM_COMPILER, build.SOURCE, tmp_path / "kernels.so", flags, STATIC_FLAGS)
    machine = (tmp_path / "kernels.so").read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183, "EM_AARCH64 of the ELF header"


def test_a_checkout_compiles_its_kernels(tmp_path, source):
    found = find_library(source, tmp_path / "none", tmp_path / "cache")
    assert found.parent == tmp_path / "cache"
    assert os.access(found, os.X_OK)
    assert shutil.which(find_compiler()) is not None
