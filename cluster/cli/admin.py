"""The operator's commands: `specdec status`, `specdec speculation` and `specdec profile`."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import click

from cluster.api.http.admin_json import to_json
from cluster.cli.connection_options import ADMIN_FLAG_NAMES, admin_client, admin_flags
from cluster.cli.output import json_flag
from cluster.cli.tables import audit_table, moment_line, profile_table, replica_table, state_table
from specdec.config.methods import METHOD_NAMES
from specdec.types.control import SPECULATION_MODES, RateRule
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

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.command(short_help="Show every replica and its load.")
@json_flag
@admin_flags
def status(as_json: bool, **connection: Any) -> None:
    """Show every replica with its load, and what is wanted of speculation."""
    with admin_client(**connection) as client:
        answer = client.status()
    if as_json:
        click.echo(to_json(answer))
        return
    click.echo(replica_table(answer))
    click.echo()
    click.echo(state_table(answer.speculation))


@click.command(short_help="Record what the models do in their next steps.")
@click.option(
    "--num-steps",
    type=int,
    default=DEFAULT_PROFILE_STEPS,
    show_default=True,
    help=f"Steps of each model, from 1 to {MAX_PROFILE_STEPS}.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=DEFAULT_PROFILE_TIMEOUT_S,
    show_default=True,
    help=f"Seconds to wait for so many, from {MIN_PROFILE_TIMEOUT_S:g} to "
    f"{MAX_PROFILE_TIMEOUT_S:g}.",
)
@click.option(
    "--replica",
    "replica_id",
    default="",
    help="Whose models, as `specdec status` names it. Default: of the replica that answers.",
)
@json_flag
@admin_flags
def profile(
    num_steps: int, timeout_s: float, replica_id: str, as_json: bool, **connection: Any
) -> None:
    """Record what the models of a replica do in their next steps, and show what took most.

    The service needs a --profile-dir for the traces, and requests to have steps.
    """
    order = ProfileOrder(num_steps, timeout_s, replica_id)
    with admin_client(**connection) as client:
        report = client.profile(order)
    click.echo(to_json(report) if as_json else profile_table(report))


@click.group()
def speculation() -> None:
    """Show or change how the service speculates, while it runs."""


@speculation.command("get")
@json_flag
@admin_flags
def get_speculation(as_json: bool, **connection: Any) -> None:
    """Show what is in force, what is configured, and who changed it last."""
    with admin_client(**connection) as client:
        _show(client.get_speculation(), as_json)


_who_flags = (
    click.option("--reason", default="", help="Why, for whoever looks at it later."),
    click.option(
        "--expected-version",
        type=int,
        help="Change nothing unless this is the present version. Default: any is.",
    ),
)


def _change_flags(command: _Command) -> _Command:
    for flag in _who_flags:
        command = flag(command)
    return json_flag(admin_flags(command))


@speculation.command("set")
@click.option(
    "--mode",
    type=click.Choice(SPECULATION_MODES),
    help="auto drafts up to the threshold, as much as pays; on at every load; off at none.",
)
@click.option(
    "--threshold",
    type=int,
    help="Most decoding requests on a replica that mode auto drafts for, from 0 to 4096.",
)
@click.option(
    "--num-speculative-tokens",
    type=int,
    help="Draft tokens a step for requests that do not choose, and most that the policy may "
    "choose; from 0 to 32.",
)
@click.option(
    "--method",
    type=click.Choice(METHOD_NAMES),
    help="What drafts for requests that do not choose, where several methods are loaded.",
)
@click.option(
    "--allow-request-override/--no-allow-request-override",
    default=None,
    help="Whether requests may choose method and number, and opt out.",
)
@click.option(
    "--allowed-verifier",
    "allowed_verifiers",
    type=click.Choice(VERIFIERS),
    multiple=True,
    help="A verifier that new requests may name; again for each. Default: no change.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RPS:WHAT",
    help="From so many requests a second over the service on, a mode or a number of draft tokens, "
    "such as 20:off or 5:2; again for each, by ascending rate. They replace those that there are.",
)
@click.option("--no-rules", is_flag=True, help="Take all rules away.")
@click.option(
    "--ttl",
    "ttl_s",
    type=float,
    help="Seconds after which all that operators have set ends; 0 for never.",
)
@click.option("--reset", is_flag=True, help="First go back to the configured values.")
@_change_flags
def set_speculation(
    as_json: bool,
    rules: tuple[str, ...],
    no_rules: bool,
    allowed_verifiers: tuple[VerifierName, ...],
    **words: Any,
) -> None:
    """Change what is given, on every replica within a second. It outlasts a restart."""
    connection = {name: words.pop(name) for name in ADMIN_FLAG_NAMES}
    wanted = SpeculationChange(
        updated_by=_who(),
        rules=_rules(rules, no_rules),
        allowed_verifiers=allowed_verifiers or None,
        **words,
    )
    with admin_client(**connection) as client:
        _show(client.set_speculation(wanted), as_json)


@speculation.command("reset")
@_change_flags
def reset_speculation(
    as_json: bool, reason: str, expected_version: int | None, **connection: Any
) -> None:
    """Go back to the configured values: take back all that operators have set."""
    wanted = SpeculationChange(
        reset=True, updated_by=_who(), reason=reason, expected_version=expected_version
    )
    with admin_client(**connection) as client:
        _show(client.set_speculation(wanted), as_json)


@speculation.command("watch")
@click.option("--interval", "interval_s", type=float, default=1.0, help="Seconds, from 0.2 to 60.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many. Default: go on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@admin_flags
def watch_speculation(
    interval_s: float, count: int | None, as_json: bool, **connection: Any
) -> None:
    """Show what is drafted and why, a line a moment, until Ctrl-C."""
    with admin_client(**connection) as client:
        for fleet in islice(client.watch(interval_s), count):
            click.echo(to_json(fleet) if as_json else moment_line(fleet))


@speculation.command("log")
@click.option("--count", type=click.IntRange(1, MAX_AUDIT_PAGE), default=20, show_default=True)
@json_flag
@admin_flags
def audit_log(count: int, as_json: bool, **connection: Any) -> None:
    """Show the latest changes, the newest first: who, when, what and why."""
    with admin_client(**connection) as client:
        page = client.audit_log(count)
    click.echo(to_json(page) if as_json else audit_table(page))


def _rules(texts: tuple[str, ...], no_rules: bool) -> tuple[RateRule, ...] | None:
    if no_rules and texts:
        raise click.UsageError("--rule and --no-rules exclude each other")
    return tuple(map(_rule, texts)) if texts or no_rules else None


def _rule(text: str) -> RateRule:
    """RPS:MODE or RPS:NUMBER."""
    rate, _, what = text.partition(":")
    try:
        if what in SPECULATION_MODES:
            return RateRule(float(rate), mode=what)
        return RateRule(float(rate), num_speculative_tokens=int(what))
    except ValueError as error:
        limit = "a rate, a colon, and a mode or a number, such as 20:off"
        raise InvalidValueError("rule", text, limit) from error


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def _show(state: SpeculationState, as_json: bool) -> None:
    click.echo(to_json(state) if as_json else state_table(state))
