"""Writes the files of k8s/ that are made here, or says which of them differ.

python -m tools.chart [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.chart.files import changed_files, write_files


def main(arguments: list[str]) -> int:
    """Exit status 1 where a file is not as it would be made."""
    match arguments:
        case []:
            write_files(Path())
            return 0
        case ["check"]:
            changed = changed_files(Path())
            for path in changed:
                print(f"{path} is not as `make chart` makes it", file=sys.stderr)
            return 1 if changed else 0
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
