"""Kernels that are compiled when a wheel is built, for groups of processors, and which of them fit.

`setup.py` loads this file without its package: it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


def compiler_flags(*march: str) -> tuple[str, ...]:
    """Return the flags of the C++ compiler for processors that `march` selects.

    The loader resolves OpenMP to the library that torch has loaded, so both share one thread pool.
    No flag permits the compiler to reorder sums: they are computed in the order of the source.
    Every product that is added is fused: GCC's tunings for some processors, such as Zen 2 and 3,
    leave chains of sums unfused, which depends on the code around them, so that a row's bits would
    depend on the number of rows beside it. Clang fuses them, and ignores the parameter.
    """
    return (
        "-std=c++17",
        "-O3",
        *march,
        "-ffp-contract=fast",
        "--param=avoid-fma-max-bits=0",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-fPIC",
        "-fopenmp",
        "-Wall",
        "-Wextra",
    )


STATIC_FLAGS = ("-static-libstdc++", "-static-libgcc")
"""Flags of the linker for a library that runs where no compiler has been installed."""


@dataclass(frozen=True)
class Variant:
    """A group of processors. features: names of /proc/cpuinfo that all of them have."""

    name: str
    march: tuple[str, ...]
    features: frozenset[str]

    def library_name(self, digest: str) -> str:
        """Return the name of the file of the kernels whose sources have this digest."""
        return f"kernels-{digest}-{self.name}.so"


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

VARIANTS = {
    "x86_64": (
        Variant(
            "v4-bf16",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
            _V4 | {"avx512_vnni", "avx512_bf16"},
        ),
        Variant("v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
        Variant("v4", ("-march=x86-64-v4",), _V4),
        Variant("v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        Variant("v3", ("-march=x86-64-v3",), _V3),
    )
}
"""The variants of each architecture, the fastest first: those that the sources distinguish."""


def hash_files(source: Path) -> bytes:
    """Return a hash of the C++ files below the folder `source`, with their paths in it."""
    digest = hashlib.sha256()
    for path in sorted([*source.rglob("*.cpp"), *source.rglob("*.h")]):
        name = path.relative_to(source).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def source_digest(source: Path) -> str:
    """Return a hash of the sources and flags that precompiled kernels are made of."""
    digest = hashlib.sha256()
    for flag in (*compiler_flags(), *STATIC_FLAGS):
        digest.update(flag.encode() + b"\0")
    digest.update(hash_files(source))
    return digest.hexdigest()[:16]


def fitting_libraries(
    directory: Path, source: Path, machine: str, features: Collection[str]
) -> list[Path]:
    """Return the precompiled kernels of these sources that a processor can run, the fastest first.

    machine: its architecture. features: those of /proc/cpuinfo.
    """
    fitting = [each for each in VARIANTS.get(machine, ()) if each.features <= set(features)]
    if not fitting or not directory.is_dir():
        return []
    digest = source_digest(source)
    paths = [directory / each.library_name(digest) for each in fitting]
    return [path for path in paths if path.exists()]
