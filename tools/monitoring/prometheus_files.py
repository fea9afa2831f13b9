"""Generate Prometheus' scrape configuration and alerting rules."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import yaml

from cluster.observability.metric_definitions import CONNECTION_METRICS
from tools.monitoring.alerts import ALERTS, Alert

FLEET_JOB, REPLICA_JOB = "specdec", "specdec-replica"
TARGET = "127.0.0.1:8000"

_MADE = "# Generated from tools/monitoring by `make generate`; a test compares the two.\n"


def rules_yaml() -> str:
    """Return the alerts in the format of `rule_files`."""
    return _dump({"groups": [{"name": "specdec", "rules": [_rule(alert) for alert in ALERTS]}]})


def scrape_yaml() -> str:
    """Return the scrape configuration for a service on this machine; elsewhere the targets differ.

    One target covers the whole fleet. The other reports whether the control plane responds, which
    the first cannot report while the control plane is unavailable.
    """
    kept = "|".join(each.exposed_name for each in CONNECTION_METRICS)
    keep = {"source_labels": ["__name__"], "regex": kept, "action": "keep"}
    replica = _job(REPLICA_JOB, "/metrics/replica") | {"metric_relabel_configs": [keep]}
    return _dump(
        {
            "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [_job(FLEET_JOB, "/metrics"), replica],
        }
    )


def _job(name: str, path: str) -> dict[str, Any]:
    targets = [{"targets": [TARGET]}]
    return {"job_name": name, "metrics_path": path, "static_configs": targets}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": dedent(alert.expr).strip(),
        "for": alert.holds_for,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": alert.runbook},
    }


class _Dumper(yaml.SafeDumper):
    """YAML dumper that preserves the line breaks of multi-line strings."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def _dump(content: Any) -> str:
    return _MADE + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)
