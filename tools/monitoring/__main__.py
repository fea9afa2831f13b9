"""Write the generated files of deploy/, or with `check` list those that are out of date.

python -m tools.monitoring [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.generated_files import run
from tools.monitoring.files import generated_files

DEPLOY = Path("deploy")


def main(arguments: list[str]) -> int:
    """Return exit status 1 if `check` finds a file that is out of date."""
    return run(generated_files(DEPLOY), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
