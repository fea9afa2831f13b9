"""The operator's commands: `specdec status` and `specdec speculation`."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from cluster.cli_connection import connection_flags
from specdec.client import (
    AdminClient,
    ReplicaStatus,
    ServiceStatus,
    SpeculationChange,
    SpeculationState,
)
from specdec.speculation import SPECULATION_MODES

_SILENT_AFTER_S = 40.0  # an idle replica reports every 30

_json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@_json_flag
@connection_flags
def status(as_json: bool, address: str, tls_ca_file: Path | None) -> None:
    """Show every replica with its load, and what is wanted of speculation."""
    with AdminClient(address, tls_ca_file=tls_ca_file) as client:
        answer = client.status()
    if as_json:
        click.echo(_json(answer))
        return
    click.echo(_replica_table(answer))
    click.echo()
    click.echo(_state_table(answer.speculation))


@click.group()
def speculation() -> None:
    """Show or change how the service speculates, while it runs."""


@speculation.command("get")
@_json_flag
@connection_flags
def get_speculation(as_json: bool, address: str, tls_ca_file: Path | None) -> None:
    """Show what is in force, what is configured, and who changed it last."""
    with AdminClient(address, tls_ca_file=tls_ca_file) as client:
        _show(client.get_speculation(), as_json)


@speculation.command("set")
@click.option(
    "--mode",
    type=click.Choice(SPECULATION_MODES),
    help="auto drafts up to the threshold; on at every load; off at none.",
)
@click.option(
    "--threshold",
    type=int,
    help="Most decoding requests on a replica that mode auto drafts for, from 0 to 4096.",
)
@click.option(
    "--num-speculative-tokens",
    type=int,
    help="Draft tokens a step for requests that do not choose, from 0 to 32.",
)
@click.option("--reset", is_flag=True, help="First go back to the configured values.")
@click.option("--reason", default="", help="Why, for whoever looks at it later.")
@click.option(
    "--expected-version",
    type=int,
    help="Change nothing unless this is the present version. Default: any is.",
)
@_json_flag
@connection_flags
def set_speculation(as_json: bool, address: str, tls_ca_file: Path | None, **change: Any) -> None:
    """Change what is given, on every replica within a second. It outlasts a restart."""
    wanted = SpeculationChange(updated_by=_who(), **change)
    with AdminClient(address, tls_ca_file=tls_ca_file) as client:
        _show(client.set_speculation(wanted), as_json)


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def _show(state: SpeculationState, as_json: bool) -> None:
    click.echo(_json(state) if as_json else _state_table(state))


def _json(value: SpeculationState | ServiceStatus) -> str:
    return json.dumps(asdict(value), ensure_ascii=False, default=datetime.isoformat)


def _state_table(state: SpeculationState) -> str:
    """A line for each value, and one for who changed it."""
    configured = asdict(state.configured)
    rows = [
        [name, str(value), _origin(name in state.overridden, configured[name])]
        for name, value in asdict(state.in_force).items()
    ]
    return "\n".join([*_aligned(rows), _last_change(state)])


def _origin(is_overridden: bool, configured: object) -> str:
    return f"set by an operator; configured: {configured}" if is_overridden else "as configured"


def _last_change(state: SpeculationState) -> str:
    if state.updated_at is None:
        return "never changed"
    by = f" by {state.updated_by}" if state.updated_by else ""
    reason = f": {state.reason}" if state.reason else ""
    return f"version {state.version}, {state.updated_at:%Y-%m-%d %H:%M:%S} UTC{by}{reason}"


def _replica_table(answer: ServiceStatus) -> str:
    if not answer.replicas:
        return "no replica has reported yet"
    heading = ["replica", "state", "up", "running", "waiting", "decoding", "kv", "speculation"]
    lines = _aligned([heading, *(_replica_row(replica) for replica in answer.replicas)])
    if answer.num_lost_replicas:
        lines.append(f"{answer.num_lost_replicas} lost since the control plane started")
    return "\n".join(lines)


def _replica_row(replica: ReplicaStatus) -> list[str]:
    report = replica.report
    version = report.speculation_version
    return [
        report.replica_id,
        _condition(replica),
        _duration(replica.uptime_s),
        str(report.num_running),
        str(report.num_waiting),
        str(report.num_decoding),
        f"{report.kv_cache_usage:.0%}",
        f"{'on' if report.is_speculation_on else 'off'}"
        + ("" if version is None else f" (version {version})"),
    ]


def _condition(replica: ReplicaStatus) -> str:
    if replica.age_s > _SILENT_AFTER_S:
        return f"silent for {_duration(replica.age_s)}"
    return "ready" if replica.report.is_ready else f"not ready: {replica.report.reason}"


def _duration(seconds: float) -> str:
    """The two largest units: 42s, 3m05s, 2h07m, 4d01h."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days}d{rest_hours:02}h"
    if hours:
        return f"{hours}h{rest_minutes:02}m"
    return f"{minutes}m{rest_s:02}s" if minutes else f"{rest_s}s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
