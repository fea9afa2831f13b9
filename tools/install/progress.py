"""Runs pip, and prints a line whenever pip has printed nothing for some seconds.

    python -m tools.install.progress FOLDER install ...

pip unpacks and installs for more than a minute without output. The line has the seconds since the
start and the size of FOLDER, into which it installs.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

SILENCE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run pip with all arguments but the first; return its exit code."""
    folder, *rest = arguments
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *rest]
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in with_reminders(pip.stdout, SILENCE_S):
            print(line or _reminder(folder, time.monotonic() - started), flush=True)
    return pip.returncode


def with_reminders(lines: Iterable[str], silence_s: float) -> Iterator[str | None]:
    """Yield the lines that are not empty, and None after each `silence_s` without a line."""
    received: queue.Queue[str | None] = queue.Queue()

    def receive() -> None:
        for line in lines:
            received.put(line)
        received.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            line = received.get(timeout=silence_s)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        if line.strip():
            yield line.rstrip()


def _reminder(folder: str, elapsed_s: float) -> str:
    return f"  {elapsed_s:.0f} s: {size_of(folder) / 1e6:.0f} MB installed"


def size_of(folder: str) -> int:
    """Return the bytes of all files in a folder that pip may change meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118
            except FileNotFoundError:
                continue
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
