"""The services of this user on this machine: a file for each, by which commands find its address.

The files are in a directory that only the user can read, and hold no secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import psutil

from specdec.config.hardware import default_cache_dir

_MAX_FILES, _MAX_BYTES = 256, 8192
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RunningService:
    """A service that is ready. pid, started_at_s: of its process; see `started_at_s`.

    grpc_address, http_address: host:port of both APIs. models: their names. boot: the id of the
    boot of the system; empty in files of a former version and where there are none.
    """

    pid: int
    started_at_s: float
    grpc_address: str
    http_address: str
    models: tuple[str, ...]
    boot: str = ""

    @classmethod
    def of_this_process(
        cls, grpc_address: str, http_address: str, models: tuple[str, ...]
    ) -> RunningService:
        """Return a service of this process."""
        pid, boot = os.getpid(), boot_id()
        started = started_at_s(pid, boot)
        return cls(pid, started, grpc_address, http_address, models, boot)

    @property
    def is_running(self) -> bool:
        """Return whether its process runs."""
        if self.boot not in ("", boot_id()):
            return False
        with suppress(psutil.Error):
            return abs(started_at_s(self.pid, self.boot) - self.started_at_s) < 1
        return False


def boot_id() -> str:
    """Return the id of this boot of the system; empty where there are none, outside Linux."""
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def started_at_s(pid: int, boot: str) -> float:
    """Return when a process started: pids are used again. Raises psutil.Error.

    In seconds since the boot, or since 1970 if that has no id: then setting the clock changes it.
    """
    at_s = psutil.Process(pid).create_time()
    return at_s - psutil.boot_time() if boot else at_s


def services_dir() -> Path:
    """Return the directory of the files: under $XDG_RUNTIME_DIR if that exists, or in the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "specdec" / "services"
    return default_cache_dir() / "services"


@contextmanager
def recorded(service: RunningService) -> Iterator[None]:
    """List a service for other commands within the context. Raises OSError."""
    directory = services_dir()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"{directory} can be written by others")
    path = directory / f"{service.pid}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(service), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_services() -> list[RunningService]:
    """Return the services of this user that run; remove the files of those that were killed."""
    directory = services_dir()
    if not _is_private(directory):
        return []
    found = []
    for path in islice(sorted(directory.glob("*.json")), _MAX_FILES):
        service = _read(path)
        if service is not None and service.is_running:
            found.append(service)
        else:
            with suppress(OSError):
                path.unlink()
    return found


def _is_private(directory: Path) -> bool:
    """Return whether a directory exists, is the user's, and cannot be written by others."""
    try:
        status = directory.stat(follow_symlinks=False)
    except OSError:
        return False
    return directory.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _read(path: Path) -> RunningService | None:
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(_MAX_BYTES))
        return RunningService(**{**fields, "models": tuple(fields["models"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
