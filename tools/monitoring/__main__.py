"""Writes the files of deploy/ that are made here, or says which of them differ.

python -m tools.monitoring [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.made_files import run
from tools.monitoring.files import made

DEPLOY = Path("deploy")


def main(arguments: list[str]) -> int:
    """Exit status 1 where a file is not as it would be made."""
    return run(made(DEPLOY), "make monitoring", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
