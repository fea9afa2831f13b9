"""Files that exist with all of their content or not at all, and the only writer of a directory."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.types.errors import SpecdecError

logger = logging.getLogger(__name__)

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP})
"""Errors of a file system without locks, besides ENOSYS, for which filelock has another lock."""


class DirectoryInUseError(SpecdecError):
    """Another process writes to the directory."""


@contextmanager
def sole_writer(lock_file: Path, use: str) -> Iterator[None]:
    """Create the directory of a lock file, and keep other writers out of it until the end.

    use: as in "another process trains in ./run". Raises DirectoryInUseError. A file system without
    locks is reported by a warning, and keeps no writer out.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DirectoryInUseError(f"another process {use} {lock_file.parent}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s is not locked against another process: %s", lock_file.parent, error)
    try:
        yield
    finally:
        lock.release()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that exists with all of its content or not at all, even after a power cut.

    Raises OSError with the name of the file, such as for a full disk, and leaves no part of it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _flush_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
