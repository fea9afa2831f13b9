"""Two minutes of chaos for each service; `make chaos` runs it for longer, with other seeds."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos.suite import NODES, SERVICES, run
from tests.e2e.two_nodes import missing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", SERVICES)
def test_two_minutes_of_faults_violate_nothing(tiny_model_dir, tmp_path, name):
    report = run(name, tiny_model_dir, tmp_path, 120, seed=0)
    print("\n".join(report.table()))
    assert report.violations == []
    assert len(report.injected) >= 3


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_minutes_of_faults_between_nodes_violate_nothing(tiny_model_dir, tmp_path):
    report = run(NODES, tiny_model_dir, tmp_path, 120, seed=0)
    print("\n".join(report.table()))
    assert report.violations == []
    assert len(report.injected) >= 3


def report_of(module, *directories, timeout_s):
    """Return the report of a program of two rounds, which has found no violation."""
    command = [sys.executable, "-m", f"tests.chaos.{module}", *map(str, directories), "2", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["violations"] == []
    return report


def test_updates_under_traffic_violate_nothing(tiny_model_dir, tmp_path):
    report = report_of("updates", tiny_model_dir, tmp_path, timeout_s=600)
    assert report["num_calls"] > 20


def test_changes_of_one_model_do_not_disturb_the_other(tiny_model_dir, tmp_path):
    report = report_of("redeployments", tiny_model_dir, tmp_path, timeout_s=900)
    assert report["polls"]["/metrics"]["200"] > 20
    assert report["polls"]["by name"]["503"] > 5
    assert report["polls"]["by path"]["503"] > 5
    changes = Counter(name for name, _ in report["recovered_s"])
    assert changes == {"redeploy": 2, "update": 2, "kill": 2}
