"""Writes the files of k8s/ that are made here, or says which of them differ.

python -m tools.chart [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.chart.files import made
from tools.made_files import run


def main(arguments: list[str]) -> int:
    """Exit status 1 where a file is not as it would be made."""
    return run(made(Path()), "make chart", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
