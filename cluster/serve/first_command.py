"""The commands that `specdec serve` suggests, spelled so that the user's shell finds them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FIRST_PROMPT = "Write a Python function that returns the sum of a list."
"""Its answer is code, which drafters predict well."""


def command_name() -> str:
    """Return how to call the running `specdec` command: by its name only if PATH has it."""
    program = sys.argv[0]
    if Path(program).name == "__main__.py":
        return f"{sys.executable} -m cluster"
    found = shutil.which("specdec")
    return "specdec" if found and os.path.realpath(found) == os.path.realpath(program) else program


def first_command(address: str) -> str:
    """Return a command that calls the service. address: its gRPC address, and further flags."""
    return f"{command_name()} generate --address {address} --temperature 0 '{FIRST_PROMPT}'"
