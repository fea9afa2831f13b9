"""Compiles C++ sources to a shared library, once a machine: what was compiled is kept."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from specdec.types.errors import SpecdecError

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
"""OpenMP's library is found by its name among those already loaded, torch's own: one thread pool.

Nothing here lets the compiler reorder sums, so the order that a kernel writes is the one it runs.
"""

_TIMEOUT_S = 300.0
_WRITABLE_BY_OTHERS = 0o022
_MAX_MESSAGE_CHARS = 2000


class BuildError(SpecdecError):
    """There is no compiler, it refused the sources, or what was made cannot be trusted."""


def find_compiler() -> str:
    """The path of $CXX, else of the system's C++ compiler; raises BuildError without one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler found: install g++ or clang++, or name one in CXX")


def build(sources: Sequence[Path], directory: Path) -> Path:
    """Returns the library of `sources` (.cpp, and .h that they include) in `directory`.

    Compiles where no library was made of the same sources by the same compiler for the same
    processor. Processes that need it at once wait for the first of them. Raises BuildError, also
    where another user could have written the library: it would run as this one.
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
        limit = "it must belong to this user or root, and nobody else may write it"
        raise BuildError(f"{path} {found}; {limit}")


def _compile(compiler: str, sources: Sequence[Path], library: Path) -> None:
    """Renames at the end, so that a library that exists is whole. Needs the library's lock."""
    for left_behind in library.parent.glob(f"{library.stem}.*.tmp"):
        shutil.rmtree(left_behind)
    with TemporaryDirectory(".tmp", f"{library.stem}.", library.parent) as directory:
        unfinished = Path(directory, library.name)
        to_object = partial(_compile_unit, compiler, Path(directory))
        units = [path for path in sources if path.suffix == ".cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            objects = list(compilers.map(to_object, units))
        _run([compiler, "-shared", "-fopenmp", "-o", str(unfinished), *objects])
        unfinished.chmod(0o755)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # or a crash of the machine could leave a name without content
        unfinished.replace(library)


def _compile_unit(compiler: str, directory: Path, unit: Path) -> str:
    """Returns the path of its object file in `directory`."""
    made = str(directory / f"{unit.stem}.o")
    _run([compiler, *FLAGS, "-c", "-o", made, str(unit)])
    return made


def _run(command: list[str]) -> str:
    """What a compiler printed; raises BuildError with what it complained of."""
    try:
        ended = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr[:_MAX_MESSAGE_CHARS]
        raise BuildError(f"{command[0]} failed: {message}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return ended.stdout


def _fingerprint(compiler: str, sources: Sequence[Path]) -> str:
    """Names everything that a library depends on, the processor of `-march=native` included."""
    digest = hashlib.sha256()
    for part in (compiler, _run([compiler, "--version"]), *FLAGS, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instructions that the processor has, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
