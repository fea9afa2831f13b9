"""`specdec completion`: what a shell needs to complete the command's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_SPECDEC_COMPLETE"
"""By which the script asks the command; click looks at it when it starts."""


@click.command(short_help="Print the script by which a shell completes this command.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    r"""Print the script that completes commands, flags and their values in SHELL.

    \b
    bash   eval "$(specdec completion bash)"      in ~/.bashrc
    zsh    eval "$(specdec completion zsh)"       in ~/.zshrc
    fish   specdec completion fish | source       in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that are offered"
    root = ctx.find_root().command
    click.echo(kind(root, {}, "specdec", COMPLETE_VARIABLE).source())
