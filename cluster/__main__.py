"""`python -m cluster` is the `specdec` command."""

from cluster.cli.main import main

main(prog_name="specdec")
