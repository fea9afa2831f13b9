"""Loads the C++ kernels: those of the wheel, or else compiled on this machine and cached."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch  # noqa: F401 (loads the OpenMP library that the kernels share)
from filelock import FileLock

from specdec.config.hardware import default_cache_dir
from specdec.kernels.cpu.compiler import CompileError, compile_library, find_compiler, run
from specdec.kernels.cpu.variants import compiler_flags, fitting_libraries, hash_files
from specdec.types.errors import SpecdecError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source")
"""Folder of the C++ files, in one folder for each purpose."""

PRECOMPILED = Path(__file__).with_name("precompiled")
"""Folder of a wheel's kernels for groups of processors; a checkout has none."""

FLAGS = compiler_flags("-march=native")

_WRITABLE_BY_OTHERS = 0o022


class BuildError(SpecdecError):
    """A missing compiler, a failed compilation, or a library that another user could change."""


def native_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled on first use if the wheel has none that fit.

    None, with a warning, where that fails. Calls release the GIL. The kernels use torch's threads:
    `torch.set_num_threads` applies.
    """
    return _load().library


def native_library_fault() -> str:
    """Return why the kernels are not available, or an empty string; compiles as needed."""
    return _load().fault


@dataclass(frozen=True)
class _LoadResult:
    """The library, or the reason why it is missing."""

    library: ctypes.CDLL | None = None
    fault: str = ""


@cache
def _load() -> _LoadResult:
    try:
        path = find_library(SOURCE, PRECOMPILED, default_cache_dir() / "kernels")
        return _LoadResult(ctypes.CDLL(str(path)))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available; using torch kernels: %s", error)
        return _LoadResult(fault=str(error))


def find_library(source: Path, precompiled: Path, cache_directory: Path) -> Path:
    """Return a precompiled library of `source` that this machine can load, or build one.

    Raises BuildError.
    """
    features = _processor().split()
    for path in fitting_libraries(precompiled, source, platform.machine(), features):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:  # such as an older C library than that of the build
            logger.warning("precompiled kernels cannot be loaded: %s", error)
        else:
            logger.info("CPU kernels: %s", path.name)
            return path
    return build(source, cache_directory)


def declare(library: ctypes.CDLL, **signatures: tuple[Any, ...]) -> None:
    """Set result and argument types of functions, given by their names without `specdec_`."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"specdec_{name}")
        function.restype, function.argtypes = result, arguments


def build(source: Path, directory: Path) -> Path:
    """Return the library of the C++ files below `source` in `directory`.

    Compiles unless `directory` holds a library of the same sources, compiler and processor.
    Concurrent processes wait for the first one. Raises BuildError; also if another user could have
    written the library, because its code would run as the current user.
    """
    try:
        compiler = find_compiler()
        library = directory / f"kernels-{_fingerprint(compiler, source)}.so"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not library.exists():
            with FileLock(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(compiler, source, library)
    except CompileError as error:
        raise BuildError(str(error)) from error
    for path in (directory, library):
        _require_own(path)
    return library


def _require_own(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & _WRITABLE_BY_OTHERS:
        found = f"belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}"
        limit = "it must belong to this user or root and be writable by its owner only"
        raise BuildError(f"{path} {found}; {limit}")


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Compile and rename at the end, so that the library is never partial. Needs its lock."""
    for stale in library.parent.glob(f"{library.stem}.*.tmp"):  # of killed processes
        shutil.rmtree(stale)
    with TemporaryDirectory(".tmp", f"{library.stem}.", library.parent) as directory:
        unfinished = Path(directory, library.name)
        logger.warning("compiling the CPU kernels (once a version, half a minute or more)")
        compile_library(compiler, source, unfinished, FLAGS)
        unfinished.chmod(0o755)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # a crash must not leave an empty file under the final name
        unfinished.replace(library)


def _fingerprint(compiler: str, source: Path) -> str:
    """Hash everything that a library depends on, including the processor (-march=native)."""
    digest = hashlib.sha256()
    for part in (compiler, run([compiler, "--version"]), *FLAGS, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    digest.update(hash_files(source))
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return the processor's instruction set flags where the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
