"""`specdec lora`: the LoRA adapters of a running service."""

from __future__ import annotations

from typing import Any

import click

from cluster.cli.options import admin_client, admin_flags, end_order, order_flags, show_reports
from cluster.cli.output import json_flag
from cluster.cli.tables import adapter_table
from specdec.client import AdapterOrder


@click.group()
def lora() -> None:
    """Show, load or unload the LoRA adapters of a running service."""


@lora.command("list", short_help="Show the adapters and their acceptance.")
@json_flag
@admin_flags
def list_adapters(as_json: bool, **connection: Any) -> None:
    """Show the adapters of every replica, with the acceptance of their drafts."""
    with admin_client(**connection) as client:
        show_reports(client.adapters(), adapter_table, as_json)


@lora.command("load", short_help="Load an adapter.")
@click.argument("name")
@click.argument("path", default="")
@click.option(
    "--replace",
    "replaces",
    is_flag=True,
    help="Replace an adapter of this name; its running requests complete with the old one.",
)
@click.option(
    "--draft-path",
    default="",
    help="An adapter of the draft model or head, with which it drafts for the requests of NAME.",
)
@order_flags
def load(
    name: str,
    path: str,
    replaces: bool,
    draft_path: str,
    as_json: bool,
    replica_id: str,
    **connection: Any,
) -> None:
    """Load the adapter at PATH, a directory in PEFT's layout or a Hub id, under NAME.

    Without PATH, the model itself answers requests for NAME, and --draft-path drafts for them.
    Requests select it with NAME as their model. The service must have been started with
    --enable-lora. A replica that starts later has the adapters of --lora-modules only.
    """
    from specdec.models.resolve import portable_name

    order = AdapterOrder.load(
        name,
        path and portable_name(path),
        replaces=replaces,
        replica_id=replica_id,
        draft_path=draft_path and portable_name(draft_path),
    )
    with admin_client(**connection) as client:
        end_order(client.load_adapter(order), adapter_table, as_json)


@lora.command("unload", short_help="Unload an adapter.")
@click.argument("name")
@order_flags
def unload(name: str, as_json: bool, replica_id: str, **connection: Any) -> None:
    """Refuse further requests for the adapter NAME. Running requests complete with it."""
    with admin_client(**connection) as client:
        end_order(client.unload_adapter(name, replica_id), adapter_table, as_json)
