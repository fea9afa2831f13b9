"""The `specdec` command.

Results go to stdout, everything else to stderr. Modules that are slow to import are imported where
they are used, so that `specdec generate` starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType

import click
from click.shell_completion import get_completion_class

from cluster.cli.errors import OneLineErrors
from cluster.cli.output import json_flag, show_result

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "adapt": "training.adapt",
        "bench": "bench.cli",
        "chat": "chat",
        "doctor": "doctor.doctor",
        "drafter": "drafter",
        "endpoint-picker": "endpoint_picker",
        "eval-drafter": "training.eval_drafter",
        "generate": "generate",
        "lora": "lora",
        "models": "models",
        "profile": "admin",
        "receipt-key": "receipts",
        "serve": "serve",
        "speculation": "admin",
        "status": "admin",
        "tokenize": "generate",
        "train": "training.train",
        "train-data": "training.train_data",
        "verify": "receipts",
    }
)
"""The modules of the commands that are not here; the function has the name of the command."""

_SERVERS = ("serve", "endpoint-picker")
"""The commands whose output has what gRPC logs; in that of others an error is one line."""

_SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_SPECDEC_COMPLETE"
"""The environment variable through which the script asks click for completions."""

_COMPLETION_HELP = """Generate the completion script for SHELL: bash, zsh or fish.

The script completes commands, flags and their values. To load it in every session:

\b
bash   eval "$(specdec completion bash)"      in ~/.bashrc
zsh    eval "$(specdec completion zsh)"       in ~/.zshrc
fish   specdec completion fish | source       in ~/.config/fish/config.fish
"""


class Commands(OneLineErrors):
    """Command group that imports the module of a command where it is used.

    Training runs on machines without Ray, gRPC and HTTP, which other commands need.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *_MODULES})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None where there is none of that name."""
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        if cmd_name not in _SERVERS:  # gRPC reads it where it is imported
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        module = import_module(f"cluster.cli.{_MODULES[cmd_name]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command), "a function that is no command"
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specdec", message="specdec %(version)s")
def main() -> None:
    """Serve large language models with speculative decoding."""


@main.command("version")
@json_flag
def show_version(as_json: bool) -> None:
    """Show the version."""
    own = version("specdec")
    show_result({"version": own}, f"specdec {own}", as_json)


@main.command(help=_COMPLETION_HELP, short_help="Generate a shell completion script.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    root = ctx.find_root().command
    click.echo(kind(root, {}, "specdec", COMPLETE_VARIABLE).source())
