"""Text tables of the admin commands: settings, replicas, statistics, audit log and profiles."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence

from cluster.cli.output import counted
from specdec.types.adapters import AdapterInfo, AdapterReport
from specdec.types.control import CONTROL_VALUES, AuditPage, SpeculationState
from specdec.types.drafters import DrafterReport, DrafterVersion
from specdec.types.reports.fleet import FleetStatistics, ReplicaStatus, ServiceStatus
from specdec.types.reports.profile import ProfileReport, WorkerProfile
from specdec.types.sampling.sampling_params import SERVED_VERIFIERS

_SILENT_AFTER_S = 40.0  # an idle replica reports every 30 s


def state_table(state: SpeculationState) -> str:
    """Return a line for each value and rule, and one for the last change."""
    rows = [
        [name, _format_value(getattr(state.in_force, name)), _origin(name, state)]
        for name in CONTROL_VALUES
    ]
    rules = [_rule_line(state, index) for index in range(len(state.rules))]
    expiry = [] if state.expires_at is None else [f"until {state.expires_at:%Y-%m-%d %H:%M:%S} UTC"]
    return "\n".join([*aligned(rows), *rules, _last_change(state), *expiry])


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return "all" if value == SERVED_VERIFIERS else ",".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "all" if value is None else str(value)


def _rule_line(state: SpeculationState, index: int) -> str:
    rule = state.rules[index]
    count = rule.num_speculative_tokens
    parts = [] if rule.mode is None else [f"mode {rule.mode}"]
    parts += [] if count is None else [f"num_speculative_tokens {count}"]
    active = " (active)" if index == state.active_rule else ""
    return f"from {rule.min_requests_per_s:g} requests/s: {', '.join(parts)}{active}"


def _origin(name: str, state: SpeculationState) -> str:
    value, configured = getattr(state.in_force, name), getattr(state.configured, name)
    if _by_rule(name, state):
        return f"by a rule; configured: {_format_value(configured)}"
    if name in state.overridden:
        return f"set by an operator; configured: {_format_value(configured)}"
    assert value == configured, "only a rule or an override changes a configured value"
    return "as configured"


def _by_rule(name: str, state: SpeculationState) -> bool:
    if state.active_rule is None:
        return False
    return getattr(state.rules[state.active_rule], name, None) is not None


def statistics_line(fleet: FleetStatistics) -> str:
    """Return time and load, and the draft decision of each replica with its reason."""
    reports = [replica.report for replica in fleet.status.replicas]
    speculation = fleet.totals.speculation
    drafts = ", ".join(
        f"{each.replica_id} k={each.num_chosen_tokens} ({each.decision_reason or 'idle'})"
        for each in reports
    )
    decoding, waiting = (
        sum(getattr(each, name) for each in reports) for name in ("num_decoding", "num_waiting")
    )
    return (
        f"{fleet.at:%H:%M:%S}  {fleet.requests_per_s:.1f} requests/s  {decoding} decoding  "
        f"{waiting} waiting  acceptance {speculation.acceptance_rate:.0%}  {drafts}"
    )


def audit_table(page: AuditPage) -> str:
    """Return a line for each change: version, time, operator, change and reason."""
    if not page.entries:
        return "never changed"
    return "\n".join(
        aligned(
            [
                [
                    str(entry.version),
                    f"{entry.at:%Y-%m-%d %H:%M:%S} UTC",
                    entry.updated_by or "-",
                    json.dumps(dict(entry.change), ensure_ascii=False),
                    entry.reason,
                ]
                for entry in page.entries
            ]
        )
    )


def _last_change(state: SpeculationState) -> str:
    if state.updated_at is None:
        return "never changed"
    by = f" by {state.updated_by}" if state.updated_by else ""
    reason = f": {state.reason}" if state.reason else ""
    return f"version {state.version}, {state.updated_at:%Y-%m-%d %H:%M:%S} UTC{by}{reason}"


def replica_table(service: ServiceStatus) -> str:
    """Return a heading, a line for each replica, and the number of lost replicas."""
    if not service.replicas:
        return "no replica has reported yet"
    heading = ["replica", "state", "up", "running", "waiting", "decoding", "kv", "speculation"]
    lines = aligned([heading, *(_replica_row(replica) for replica in service.replicas)])
    if service.num_lost_replicas:
        lines.append(f"{service.num_lost_replicas} lost since the control plane started")
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
        + ("" if version is None else f" (version {version})")
        + (", draft worker unavailable" if report.is_draft_worker_up is False else ""),
    ]


def _condition(replica: ReplicaStatus) -> str:
    if replica.age_s > _SILENT_AFTER_S:
        return f"silent for {_duration(replica.age_s)}"
    return "ready" if replica.report.is_ready else f"not ready: {replica.report.reason}"


def profile_table(report: ProfileReport) -> str:
    """Return, for each rank, the number of steps, the trace's path and a line per operation."""
    heading = f"replica {report.replica_id}, {report.elapsed_s:.1f} s"
    return "\n\n".join([heading, *map(_worker_table, report.workers)])


def drafter_table(reports: Sequence[DrafterReport]) -> str:
    """Return, for each replica, a line for each version of its draft head."""
    return "\n\n".join(map(_versions, reports))


def _versions(report: DrafterReport) -> str:
    if report.fault:
        return f"replica {report.replica_id}: {report.fault}"
    pinned = ", pinned" if report.is_pinned else ""
    heading = f"replica {report.replica_id}: {report.num_rollbacks} rolled back{pinned}"
    columns = ["version", "state", "drafts", "first accepted", "acceptance length", "head"]
    return "\n".join([heading, *aligned([columns, *map(_version_row, report.versions)])])


def _version_row(version: DrafterVersion) -> list[str]:
    acceptance, fault = version.acceptance, version.fault
    return [
        str(version.number),
        version.state.value,
        str(version.speculation.num_drafts),
        "" if acceptance is None else f"{acceptance:.1%}",
        "" if acceptance is None else f"{version.speculation.mean_acceptance_length:.2f}",
        f"{version.name}: {fault}" if fault else version.name,
    ]


def adapter_table(reports: Sequence[AdapterReport]) -> str:
    """Return, for each replica, a line for each of its adapters."""
    return "\n\n".join(map(_adapters, reports))


def _adapters(report: AdapterReport) -> str:
    if report.fault:
        return f"replica {report.replica_id}: {report.fault}"
    count = len(report.adapters)
    heading = f"replica {report.replica_id}: {counted(count, 'adapter')}"
    columns = ["name", "state", "rank", "requests", "tokens", "acceptance", "source"]
    columns += ["draft adapter"] * any(each.draft_source for each in report.adapters)
    rows = [columns, *(_adapter_row(each)[: len(columns)] for each in report.adapters)]
    return "\n".join([heading, *(aligned(rows) if count else ())])


def _adapter_row(adapter: AdapterInfo) -> list[str]:
    speculation = adapter.speculation
    return [
        adapter.name,
        adapter.state.value,
        str(adapter.rank),
        str(adapter.num_requests),
        str(adapter.num_generated_tokens),
        f"{speculation.acceptance_rate:.1%}" if speculation.num_drafts else "",
        adapter.source,
        adapter.draft_source,
    ]


def _worker_table(worker: WorkerProfile) -> str:
    where = worker.trace_path or f"no trace: {worker.fault}"
    heading = f"{worker.worker}, rank {worker.rank}: {counted(worker.num_steps, 'step')}, {where}"
    columns = ["operation", "calls", "self ms", "total ms", "device ms"]
    rows = [
        [each.name, str(each.num_calls), *map(_ms, (each.self_ms, each.total_ms, each.device_ms))]
        for each in worker.operations
    ]
    return "\n".join([heading, *(aligned([columns, *rows]) if rows else ())])


def _ms(value: float) -> str:
    return f"{value:.2f}"


def _duration(seconds: float) -> str:
    """Format a duration in its two largest units: 42s, 3m05s, 2h07m, 4d01h."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days}d{rest_hours:02}h"
    if hours:
        return f"{hours}h{rest_minutes:02}m"
    return f"{minutes}m{rest_s:02}s" if minutes else f"{rest_s}s"


def shown_number(value: float | None, digits: int) -> str:
    """Return a number with `digits` digits after the point; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def aligned(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Return lines in which the cells of a column begin at the same place.

    numbers: columns whose cells end at the same place.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
