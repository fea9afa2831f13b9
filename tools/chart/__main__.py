"""Generate the generated files of k8s/, or list those that differ.

python -m tools.chart [check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.chart.files import generated_files
from tools.generated_files import run


def main(arguments: list[str]) -> int:
    """Generate or check the files; return the exit status."""
    return run(generated_files(Path()), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
