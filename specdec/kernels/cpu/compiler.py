"""Runs the C++ compiler.

`setup.py` loads this file without its package: it imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_TIMEOUT_S = 300.0
_MAX_MESSAGE_CHARS = 2000


class CompileError(Exception):
    """A missing compiler, or a failed compilation with the compiler's message."""


def find_compiler() -> str:
    """Return the path of $CXX, else of the C++ compiler; raise CompileError without one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise CompileError("no C++ compiler found: install g++ or clang++, or name one in CXX")


def compile_library(
    compiler: str,
    source: Path,
    library: Path,
    flags: Sequence[str],
    link_flags: Sequence[str] = (),
) -> None:
    """Compile the .cpp files below the folder `source` in parallel, and link them.

    Paths in #include begin at `source`. Object files are left beside `library`. Raises
    CompileError.
    """
    to_object = partial(_compile_unit, compiler, flags, source, library.parent)
    units = sorted(source.rglob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        objects = list(compilers.map(to_object, units))
    run([compiler, "-shared", "-fopenmp", *link_flags, "-o", str(library), *objects])


def _compile_unit(
    compiler: str, flags: Sequence[str], source: Path, directory: Path, unit: Path
) -> str:
    """Return the path of the object file in `directory`."""
    name = "-".join(unit.relative_to(source).with_suffix(".o").parts)
    path = str(directory / name)
    run([compiler, *flags, f"-I{source}", "-c", "-o", path, str(unit)])
    return path


def run(command: list[str]) -> str:
    """Return the compiler's output; raise CompileError with its error message."""
    try:
        completed = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr[:_MAX_MESSAGE_CHARS]
        raise CompileError(f"{command[0]} failed: {message}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error
    return completed.stdout
