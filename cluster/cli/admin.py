"""Admin commands: `specdec status`, `specdec speculation` and `specdec profile`."""

from __future__ import annotations

import getpass
import socket
from itertools import islice
from typing import Any

import click

from cluster.api.http.admin_json import to_json
from cluster.cli.connection_options import ADMIN_FLAG_NAMES, admin_client, admin_flags
from cluster.cli.help import combine_flags
from cluster.cli.output import json_flag
from cluster.cli.tables import (
    audit_table,
    profile_table,
    replica_table,
    state_table,
    statistics_line,
)
from specdec.config.methods import METHOD_NAMES
from specdec.types.control import SPECULATION_MODES, SpeculationRule
from specdec.types.control_changes import MAX_AUDIT_PAGE, SpeculationChange, SpeculationState
from specdec.types.errors import InvalidValueError
from specdec.types.profile import (
    DEFAULT_PROFILE_STEPS,
    DEFAULT_PROFILE_TIMEOUT_S,
    MAX_PROFILE_STEPS,
    MAX_PROFILE_TIMEOUT_S,
    MIN_PROFILE_TIMEOUT_S,
    ProfileOrder,
)
from specdec.types.sampling_params import VERIFIERS, VerifierName


@click.command(short_help="Show the replicas and their load.")
@json_flag
@admin_flags
def status(as_json: bool, **connection: Any) -> None:
    """Show the replicas with their load, and the speculation settings."""
    with admin_client(**connection) as client:
        service = client.status()
    if as_json:
        click.echo(to_json(service))
        return
    click.echo(replica_table(service))
    click.echo()
    click.echo(state_table(service.speculation))


@click.command(short_help="Profile the next steps of the models.")
@click.option(
    "--num-steps",
    type=int,
    default=DEFAULT_PROFILE_STEPS,
    show_default=True,
    help=f"Number of steps to record of each model, from 1 to {MAX_PROFILE_STEPS}.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=DEFAULT_PROFILE_TIMEOUT_S,
    show_default=True,
    help=f"Seconds to wait for these steps, from {MIN_PROFILE_TIMEOUT_S:g} to "
    f"{MAX_PROFILE_TIMEOUT_S:g}.",
)
@click.option(
    "--replica",
    "replica_id",
    default="",
    help="Replica to profile, as shown by `specdec status`. Default: the replica that receives the "
    "call.",
)
@json_flag
@admin_flags
def profile(
    num_steps: int, timeout_s: float, replica_id: str, as_json: bool, **connection: Any
) -> None:
    """Profile the next steps of a replica's models and show the most expensive operations.

    The service must run with --profile-dir, and must have requests to process.
    """
    order = ProfileOrder(num_steps, timeout_s, replica_id)
    with admin_client(**connection) as client:
        report = client.profile(order)
    click.echo(to_json(report) if as_json else profile_table(report))


@click.group()
def speculation() -> None:
    """Show or change the speculation settings of a running service."""


@speculation.command("get", short_help="Show the current settings.")
@json_flag
@admin_flags
def get_speculation(as_json: bool, **connection: Any) -> None:
    """Show the effective and the configured settings, and the last change."""
    with admin_client(**connection) as client:
        _show(client.get_speculation(), as_json)


_change_flags = combine_flags(
    json_flag,
    admin_flags,
    click.option(
        "--expected-version",
        type=int,
        help="Fail unless this is the current version of the settings. Default: any version.",
    ),
    click.option("--reason", default="", help="Reason to record in the audit log."),
)


@speculation.command("set", short_help="Change settings on every replica.")
@click.option(
    "--mode",
    type=click.Choice(SPECULATION_MODES),
    help="auto drafts up to the threshold, if the policy expects a speedup; on always drafts; off "
    "never does.",
)
@click.option(
    "--threshold",
    type=int,
    help="Maximum number of decoding requests on a replica at which mode auto drafts, from 0 to "
    "4096.",
)
@click.option(
    "--num-speculative-tokens",
    type=int,
    help="Default number of draft tokens per step, and the maximum for the policy, from 0 to 32.",
)
@click.option(
    "--method",
    type=click.Choice(METHOD_NAMES),
    help="Default drafting method, if several are loaded.",
)
@click.option(
    "--allow-request-override/--no-allow-request-override",
    default=None,
    help="Allow requests to choose the method and the number of tokens, and to opt out.",
)
@click.option(
    "--allowed-verifier",
    "allowed_verifiers",
    type=click.Choice(VERIFIERS),
    multiple=True,
    help="Verifier that new requests may select; may be repeated. Default: no change.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RPS:VALUE",
    help="Mode, or number of draft tokens, at or above a request rate (requests/s over all "
    "replicas), such as 20:off or 5:2; may be repeated, by ascending rate. Replaces all existing "
    "rules.",
)
@click.option("--no-rules", is_flag=True, help="Remove all rules.")
@click.option("--ttl", "ttl_s", type=float, help="Seconds until all overrides expire; 0 for never.")
@click.option("--reset", is_flag=True, help="Reset to the configured values first.")
@_change_flags
def set_speculation(
    as_json: bool,
    rules: tuple[str, ...],
    no_rules: bool,
    allowed_verifiers: tuple[VerifierName, ...],
    **flags: Any,
) -> None:
    """Change the given settings on every replica within a second. They persist across restarts."""
    connection = {name: flags.pop(name) for name in ADMIN_FLAG_NAMES}
    change = SpeculationChange(
        updated_by=_operator(),
        rules=_rules(rules, no_rules),
        allowed_verifiers=allowed_verifiers or None,
        **flags,
    )
    with admin_client(**connection) as client:
        _show(client.set_speculation(change), as_json)


@speculation.command("reset")
@_change_flags
def reset_speculation(
    as_json: bool, reason: str, expected_version: int | None, **connection: Any
) -> None:
    """Remove all overrides and return to the configured values."""
    change = SpeculationChange(
        reset=True, updated_by=_operator(), reason=reason, expected_version=expected_version
    )
    with admin_client(**connection) as client:
        _show(client.set_speculation(change), as_json)


@speculation.command("watch", short_help="Print load and draft decisions at an interval.")
@click.option(
    "--interval",
    "interval_s",
    type=float,
    default=1.0,
    help="Seconds between lines, from 0.2 to 60.",
)
@click.option(
    "--count", type=click.IntRange(min=1), help="Number of lines to print. Default: no limit."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@admin_flags
def watch_speculation(
    interval_s: float, count: int | None, as_json: bool, **connection: Any
) -> None:
    """Print load and draft decisions at an interval, until Ctrl-C."""
    with admin_client(**connection) as client:
        for fleet in islice(client.watch(interval_s), count):
            click.echo(to_json(fleet) if as_json else statistics_line(fleet))


@speculation.command("log")
@click.option(
    "--count",
    type=click.IntRange(1, MAX_AUDIT_PAGE),
    default=20,
    show_default=True,
    help="Number of changes to show.",
)
@json_flag
@admin_flags
def audit_log(count: int, as_json: bool, **connection: Any) -> None:
    """Show the audit log of changes, newest first."""
    with admin_client(**connection) as client:
        page = client.audit_log(count)
    click.echo(to_json(page) if as_json else audit_table(page))


def _rules(texts: tuple[str, ...], no_rules: bool) -> tuple[SpeculationRule, ...] | None:
    if no_rules and texts:
        raise click.UsageError("--rule and --no-rules are mutually exclusive")
    return tuple(map(_rule, texts)) if texts or no_rules else None


def _rule(text: str) -> SpeculationRule:
    """Parse RPS:MODE or RPS:NUMBER. Raises InvalidValueError."""
    rate, _, value = text.partition(":")
    try:
        if value in SPECULATION_MODES:
            return SpeculationRule(float(rate), mode=value)
        return SpeculationRule(float(rate), num_speculative_tokens=int(value))
    except ValueError as error:
        limit = "RPS:MODE or RPS:NUMBER, such as 20:off"
        raise InvalidValueError("rule", text, limit) from error


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _show(state: SpeculationState, as_json: bool) -> None:
    click.echo(to_json(state) if as_json else state_table(state))
