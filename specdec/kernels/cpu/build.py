"""Compiles the C++ kernels to a shared library, caches it on the machine, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch  # noqa: F401 (loads the OpenMP library that the kernels share)
from filelock import FileLock

from specdec.config.hardware import default_cache_dir
from specdec.types.errors import SpecdecError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-fopenmp",
    "-Wall",
    "-Wextra",
)
"""Compiler flags.

The loader resolves OpenMP to the library that torch has loaded, so both share one thread pool. No
flag permits the compiler to reorder sums: they are computed in the order of the source.
"""

_TIMEOUT_S = 300.0
_WRITABLE_BY_OTHERS = 0o022
_MAX_MESSAGE_CHARS = 2000


class BuildError(SpecdecError):
    """A missing compiler, a failed compilation, or a library that another user could change."""


def native_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled on first use; None, with a warning, where that fails.

    Calls release the GIL. The kernels use torch's threads: `torch.set_num_threads` applies.
    """
    return _load().library


def native_library_fault() -> str:
    """Return why the kernels are not available, or an empty string; compiles on first use."""
    return _load().fault


@dataclass(frozen=True)
class _LoadResult:
    """The library, or the reason why it is missing."""

    library: ctypes.CDLL | None = None
    fault: str = ""


@cache
def _load() -> _LoadResult:
    sources = [*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]
    try:
        return _LoadResult(ctypes.CDLL(str(build(sources, default_cache_dir() / "kernels"))))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available; using torch kernels: %s", error)
        return _LoadResult(fault=str(error))


def declare(library: ctypes.CDLL, **signatures: tuple[Any, ...]) -> None:
    """Set result and argument types of functions, given by their names without `specdec_`."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"specdec_{name}")
        function.restype, function.argtypes = result, arguments


def find_compiler() -> str:
    """Return the path of $CXX, else of the system's C++ compiler; raise BuildError without one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler found: install g++ or clang++, or name one in CXX")


def build(sources: Sequence[Path], directory: Path) -> Path:
    """Return the library of `sources` (.cpp, and .h that they include) in `directory`.

    Compiles unless `directory` holds a library of the same sources, compiler and processor.
    Concurrent processes wait for the first one. Raises BuildError; also if another user could have
    written the library, because its code would run as the current user.
    """
    compiler = find_compiler()
    library = directory / f"kernels-{_fingerprint(compiler, sources)}.so"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not library.exists():
        with FileLock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, sources, library)
    for path in (directory, library):
        _require_own(path)
    return library


def _require_own(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & _WRITABLE_BY_OTHERS:
        found = f"belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}"
        limit = "it must belong to this user or root and be writable by its owner only"
        raise BuildError(f"{path} {found}; {limit}")


def _compile(compiler: str, sources: Sequence[Path], library: Path) -> None:
    """Compile and rename at the end, so that the library is never partial. Needs its lock."""
    for stale in library.parent.glob(f"{library.stem}.*.tmp"):  # of killed processes
        shutil.rmtree(stale)
    with TemporaryDirectory(".tmp", f"{library.stem}.", library.parent) as directory:
        unfinished = Path(directory, library.name)
        to_object = partial(_compile_unit, compiler, Path(directory))
        units = [path for path in sources if path.suffix == ".cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            objects = list(compilers.map(to_object, units))
        _run([compiler, "-shared", "-fopenmp", "-o", str(unfinished), *objects])
        unfinished.chmod(0o755)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # a crash must not leave an empty file under the final name
        unfinished.replace(library)


def _compile_unit(compiler: str, directory: Path, unit: Path) -> str:
    """Return the path of the object file in `directory`."""
    path = str(directory / f"{unit.stem}.o")
    _run([compiler, *FLAGS, "-c", "-o", path, str(unit)])
    return path


def _run(command: list[str]) -> str:
    """Return the compiler's output; raise BuildError with its error message."""
    try:
        completed = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr[:_MAX_MESSAGE_CHARS]
        raise BuildError(f"{command[0]} failed: {message}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return completed.stdout


def _fingerprint(compiler: str, sources: Sequence[Path]) -> str:
    """Hash everything that a library depends on, including the processor (-march=native)."""
    digest = hashlib.sha256()
    for part in (compiler, _run([compiler, "--version"]), *FLAGS, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return the processor's instruction set flags where the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
