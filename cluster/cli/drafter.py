"""`specdec drafter`: the versions of the draft head of a running service."""

from __future__ import annotations

from typing import Any

import click

from cluster.cli.options import admin_client, admin_flags, end_order, order_flags, show_reports
from cluster.cli.output import json_flag
from cluster.cli.tables import drafter_table
from specdec.client import DrafterOrder
from specdec.types.drafters import MAX_VERSION


@click.group()
def drafter() -> None:
    """Show or change the version of the draft head of a running service."""


@drafter.command("list", short_help="Show the versions and their acceptance.")
@json_flag
@admin_flags
def list_versions(as_json: bool, **connection: Any) -> None:
    """Show the versions of the draft head of every replica, with their acceptance."""
    with admin_client(**connection) as client:
        show_reports(client.drafters(), drafter_table, as_json)


@drafter.command("load", short_help="Draft with another version of the head.")
@click.argument("path")
@order_flags
def load(path: str, as_json: bool, replica_id: str, **connection: Any) -> None:
    """Load the head at PATH, a directory or a Hub id, and draft with it.

    Running requests draft with it from their next step on. Its method and sizes must be those of
    the configured head. A version of which fewer drafts are accepted is rolled back, unless the
    version in use is pinned. A replica that starts later has the configured head.
    """
    from specdec.models.resolve import portable_name

    order = DrafterOrder(path=portable_name(path), replica_id=replica_id)
    _order(order, as_json, connection)


@drafter.command("use", short_help="Return to an earlier version.")
@click.argument("version", type=click.IntRange(1, MAX_VERSION))
@order_flags
def use(version: int, as_json: bool, replica_id: str, **connection: Any) -> None:
    """Draft with an earlier VERSION again, as numbered by `specdec drafter list`.

    1 is the configured head. Numbers can differ between replicas that did not start together.
    """
    _order(DrafterOrder(version=version, replica_id=replica_id), as_json, connection)


@drafter.command("pin", short_help="Keep the version in use.")
@order_flags
def pin(as_json: bool, replica_id: str, **connection: Any) -> None:
    """Keep the version in use, even if fewer of its drafts are accepted."""
    _order(DrafterOrder(is_pinned=True, replica_id=replica_id), as_json, connection)


@drafter.command("unpin", short_help="Allow automatic rollback again.")
@order_flags
def unpin(as_json: bool, replica_id: str, **connection: Any) -> None:
    """Allow the version in use to be rolled back automatically again."""
    _order(DrafterOrder(is_pinned=False, replica_id=replica_id), as_json, connection)


def _order(order: DrafterOrder, as_json: bool, connection: dict[str, Any]) -> None:
    with admin_client(**connection) as client:
        end_order(client.set_drafter(order), drafter_table, as_json)
