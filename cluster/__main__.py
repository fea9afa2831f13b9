"""`python -m cluster` is the `specdec` command."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the `specdec` command, also where Ctrl-C interrupts its imports."""
    try:
        from cluster.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main(prog_name="specdec")


if __name__ == "__main__":
    run()
