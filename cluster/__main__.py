"""`python -m cluster` is the `specdec` command."""

from cluster.cli import main

main(prog_name="specdec")
