"""Tests of the generated monitoring files under deploy/ and of the runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

pytest.importorskip(
    "grafana_foundation_sdk", reason="needs grafana-foundation-sdk: pip install -e '.[dev]'"
)

from cluster.cli.admin import set_speculation
from cluster.config.serve_config import ServeConfig
from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_METRICS,
)
from tools.generated_files import changed_files, write_files
from tools.monitoring.__main__ import main
from tools.monitoring.alerts import ALERTS, RUNBOOK
from tools.monitoring.files import DASHBOARD, GENERATORS, RULES, SCRAPE, generated_files

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULE_TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.yaml"))
NOT_OURS = {"up"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: apt-get install prometheus)",
)


def panels():
    """Return every panel of the dashboard except rows."""
    dashboard = json.loads((DEPLOY / DASHBOARD).read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rule_queries():
    groups = yaml.safe_load((DEPLOY / RULES).read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def without_variables(expr):
    """Return the expression with values in place of Grafana's variables."""
    return (
        expr.replace("$__rate_interval", "1m").replace("$model_name", "m").replace("$replica", "r")
    )


def selectors(expr):
    """Return the metrics that an expression reads, each with the labels that it matches."""
    found = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, [each.name for each in node.matchers.matchers]))

    promql_parser.walk(promql_parser.parse(without_variables(expr)), visit)
    assert found, expr
    return found


def series_labels():
    """Return every series that the service can expose, with the names of its labels."""
    labels = {}
    for spec in (*REPLICA_METRICS, *FLEET_METRICS, *CONNECTION_METRICS):
        about = {"model_name"} if spec in FLEET_METRICS else {"model_name", "replica"}
        own = about | set(spec.labels)
        if spec.type == "histogram":
            labels[f"{spec.exposed_name}_bucket"] = own | {"le"}
            labels[f"{spec.exposed_name}_sum"] = labels[f"{spec.exposed_name}_count"] = own
        else:
            labels[spec.exposed_name] = own
    return labels


def test_generated_files_are_up_to_date():
    assert changed_files(generated_files(DEPLOY)) == [], "run `make generate`"


def test_check_detects_a_file_changed_by_hand(tmp_path, monkeypatch, capsys):
    write_files(generated_files(tmp_path / "deploy"))
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 0
    (tmp_path / "deploy" / RULES).write_text("groups: []\n")
    (tmp_path / "deploy" / DASHBOARD).unlink()
    assert main(["check"]) == 1
    assert "prometheus/rules.yaml is out of date" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["check"]) == 0


@pytest.mark.parametrize("expr", [*panel_queries(), *rule_queries()])
def test_every_metric_and_label_in_queries_exists(expr):
    known = series_labels()
    for name, compared in selectors(expr):
        if name in NOT_OURS:
            continue
        assert name in known, f"{name} is not defined"
        assert set(compared) <= known[name], f"{name} has no such label"


def test_every_speculation_metric_is_on_the_dashboard():
    shown = {name for expr in panel_queries() for name, _ in selectors(expr)}
    known = {name for name in series_labels() if re.search("specul|spec_decode|goodput", name)}
    assert known <= shown


def test_titles_are_unique_and_every_panel_has_a_description():
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles) > 30
    assert all(panel["description"] for panel in panels())


def test_panels_do_not_overlap():
    """All panels must lie within the 24 columns of the grid."""
    taken = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_has_a_section_of_the_runbook_and_every_section_an_alert():
    headings = re.findall(r"^## (Specdec\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alert.name for alert in ALERTS)
    assert all(alert.runbook == f"{RUNBOOK}#{alert.name.lower()}" for alert in ALERTS)


def test_every_section_has_its_three_parts():
    _, *sections = re.split(r"^## ", (ROOT / RUNBOOK).read_text(), flags=re.MULTILINE)
    for section in sections:
        for part in ("**Means.**", "**Look at.**", "**Do.**"):
            assert section.count(part) == 1, (section.splitlines()[0], part)


def test_every_alert_is_tested_to_fire_and_not_to_fire():
    fires, silent = set(), set()
    for path in RULE_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for each in case["alert_rule_test"]:
                (fires if each.get("exp_alerts") else silent).add(each["alertname"])
    assert fires == silent == {alert.name for alert in ALERTS}


@needs_promtool
def test_promtool_accepts_the_configuration_and_its_rules():
    for command in (["check", "rules", DEPLOY / RULES], ["check", "config", DEPLOY / SCRAPE]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_promtool_passes_the_tests_of_the_alerts(path):
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_generated_files_and_tests_are_present():
    present = {
        path for folder in ("grafana", "prometheus") for path in (DEPLOY / folder).rglob("*")
    }
    files = {path for path in present if path.is_file()}
    assert files == {*RULE_TESTS, *(DEPLOY / path for path in GENERATORS)}


def test_panels_and_flags_in_the_runbook_exist():
    text = (ROOT / RUNBOOK).read_text()
    named = set(re.findall(r'"([A-Z][a-z][\w -]+)"', text))
    assert named
    assert named <= {panel["title"] for panel in panels()}
    flags = set(re.findall(r"`?(--[a-z-]+)", text))
    operator_flags = {
        flag for param in set_speculation.params for flag in (*param.opts, *param.secondary_opts)
    }
    assert (
        flags <= {f"--{name.replace('_', '-')}" for name in ServeConfig.settings()} | operator_flags
    )
