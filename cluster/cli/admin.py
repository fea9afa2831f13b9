"""Admin commands: `specdec status`, `specdec speculation` and `specdec profile`."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import click

from cluster.api.http.admin_json import to_json
from cluster.cli.options import ADMIN_FLAG_NAMES, admin_client, admin_flags
from cluster.cli.output import combine_flags, default_flag, json_flag
from cluster.cli.tables import (
    audit_table,
    profile_table,
    replica_table,
    state_table,
    statistics_line,
)
from specdec.client import AdminClient
from specdec.client.codec.admin import UNSENT
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.types.control import (
    CONTROL_VALUES,
    MAX_AUDIT_PAGE,
    SPECULATION_MODES,
    AuditPage,
    RateRule,
    SpeculationChange,
    SpeculationState,
)
from specdec.types.errors import InvalidValueError
from specdec.types.reports.fleet import ServiceStatus
from specdec.types.reports.profile import (
    DEFAULT_PROFILE_STEPS,
    DEFAULT_PROFILE_TIMEOUT_S,
    MAX_PROFILE_STEPS,
    MAX_PROFILE_TIMEOUT_S,
    MIN_PROFILE_TIMEOUT_S,
    ProfileOrder,
    ProfileReport,
)
from specdec.types.sampling.sampling_params import VERIFIERS, VerifierName

_SETTINGS = (*CONTROL_VALUES, "rules", "ttl_s")
_Result = TypeVar("_Result", ServiceStatus, SpeculationState, AuditPage, ProfileReport)


@click.command(short_help="Show the replicas and their load.")
@json_flag
@admin_flags
def status(as_json: bool, **connection: Any) -> None:
    """Show the replicas with their load, and the speculation settings."""

    def text(service: ServiceStatus) -> str:
        return f"{replica_table(service)}\n\n{state_table(service.speculation)}"

    _show(AdminClient.status, text, as_json, connection)


@click.command(short_help="Profile the next steps of the models.")
@default_flag(
    "--num-steps",
    type=int,
    default=DEFAULT_PROFILE_STEPS,
    help=f"Number of steps to record of each model, from 1 to {MAX_PROFILE_STEPS}.",
)
@default_flag(
    "--timeout",
    "timeout_s",
    type=float,
    default=DEFAULT_PROFILE_TIMEOUT_S,
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
    _show(lambda client: client.profile(order), profile_table, as_json, connection)


@click.group()
def speculation() -> None:
    """Show or change the speculation settings of a running service."""


@speculation.command("get", short_help="Show the current settings.")
@json_flag
@admin_flags
def get_speculation(as_json: bool, **connection: Any) -> None:
    """Show the effective and the configured settings, and the last change."""
    _show(AdminClient.get_speculation, state_table, as_json, connection)


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
    help="Default draft length, and the maximum for the policy, from 0 to 32 tokens.",
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
    help="Mode, or draft length, at or above a request rate (requests/s over all "
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
    """Change the given settings on every replica within a second.

    They persist across restarts, until all overrides expire by this or an earlier --ttl.
    """
    connection = {name: flags.pop(name) for name in ADMIN_FLAG_NAMES}
    values = {**flags, "rules": _rules(rules, no_rules)}
    values["allowed_verifiers"] = allowed_verifiers or None
    if all(values[name] is None for name in _SETTINGS) and not flags["reset"]:
        raise click.UsageError("Nothing to change: give a setting, such as --mode off.")
    change = SpeculationChange(updated_by=_operator(), **values)
    _show(lambda client: client.set_speculation(change), state_table, as_json, connection)


@speculation.command("reset")
@_change_flags
def reset_speculation(
    as_json: bool, reason: str, expected_version: int | None, **connection: Any
) -> None:
    """Remove all overrides and return to the configured values."""
    change = SpeculationChange(
        reset=True, updated_by=_operator(), reason=reason, expected_version=expected_version
    )
    _show(lambda client: client.set_speculation(change), state_table, as_json, connection)


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
            click.echo(_json(fleet) if as_json else statistics_line(fleet))


@speculation.command("log")
@default_flag(
    "--count", type=click.IntRange(1, MAX_AUDIT_PAGE), default=20, help="Number of changes to show."
)
@json_flag
@admin_flags
def audit_log(count: int, as_json: bool, **connection: Any) -> None:
    """Show the audit log of changes, newest first."""
    _show(lambda client: client.audit_log(count), audit_table, as_json, connection)


def _rules(texts: tuple[str, ...], no_rules: bool) -> tuple[RateRule, ...] | None:
    if no_rules and texts:
        raise click.UsageError("--rule and --no-rules are mutually exclusive")
    return tuple(map(_rule, texts)) if texts or no_rules else None


def _rule(text: str) -> RateRule:
    """Parse RPS:MODE or RPS:NUMBER. Raises InvalidValueError."""
    rate, _, value = text.partition(":")
    try:
        if value in SPECULATION_MODES:
            return RateRule(float(rate), mode=value)
        return RateRule(float(rate), num_speculative_tokens=int(value))
    except ValueError as error:
        limit = "RPS:MODE or RPS:NUMBER, such as 20:off"
        raise InvalidValueError("rule", text, limit) from error


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _show(
    call: Callable[[AdminClient], _Result],
    text: Callable[[_Result], str],
    as_json: bool,
    connection: dict[str, Any],
) -> None:
    """Call the service, and print the result as JSON or as text."""
    with admin_client(**connection) as client:
        result = call(client)
    click.echo(_json(result) if as_json else text(result))


def _json(result: Any) -> str:
    """Serialize what a call returned, without the counters that only HTTP has."""
    return to_json(result, UNSENT)
