"""`specdec models`: lists the model aliases and downloads models."""

from __future__ import annotations

import click

from cluster.cli.output import json_flag, print_stderr, show_json


@click.group()
def models() -> None:
    """List model aliases and download models."""


@models.command("fetch", short_help="Download a model.")
@click.argument("name")
@json_flag
def fetch_model(name: str, as_json: bool) -> None:
    """Download model NAME, an alias or a Hugging Face Hub id, and print its directory."""
    from specdec.models.resolve import resolve

    directory = resolve(name, progress=print_stderr)
    if as_json:
        show_json({"name": name, "directory": str(directory)})
        return
    click.echo(directory)


@models.command("list", short_help="List the model aliases.")
@json_flag
def list_models(as_json: bool) -> None:
    """List the model aliases and whether they are in the cache."""
    from specdec.config.hardware import default_cache_dir
    from specdec.config.model_aliases import ALIASES
    from specdec.models.resolve import packaged_directory

    found = []
    for name, source in ALIASES.items():
        place = packaged_directory(name, default_cache_dir())
        directory = str(place) if place.is_dir() else None
        size = source.download_bytes
        found.append({"name": name, "directory": directory, "download_bytes": size})
        if not as_json:
            click.echo(f"{name}\t{directory or f'not fetched ({size / 1e6:.0f} MB)'}")
    if as_json:
        show_json({"models": found})
