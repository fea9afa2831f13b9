"""Writes the files of deploy/ that are made here, or says which of them differ.

python -m tools.monitoring [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.monitoring.files import changed_files, write_files

DEPLOY = Path("deploy")


def main(arguments: list[str]) -> int:
    """Exit status 1 where a file is not as it would be made."""
    match arguments:
        case []:
            write_files(DEPLOY)
            return 0
        case ["check"]:
            changed = changed_files(DEPLOY)
            for path in changed:
                print(f"{path} is not as `make monitoring` makes it", file=sys.stderr)
            return 1 if changed else 0
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
