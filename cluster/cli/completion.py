"""`specdec completion`: generates shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_SPECDEC_COMPLETE"
"""The environment variable through which the script asks click for completions."""


_HELP = """Generate the completion script for SHELL: bash, zsh or fish.

The script completes commands, flags and their values. To load it in every session:

\b
bash   eval "$(specdec completion bash)"      in ~/.bashrc
zsh    eval "$(specdec completion zsh)"       in ~/.zshrc
fish   specdec completion fish | source       in ~/.config/fish/config.fish
"""


@click.command(help=_HELP, short_help="Generate a shell completion script.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    root = ctx.find_root().command
    click.echo(kind(root, {}, "specdec", COMPLETE_VARIABLE).source())
