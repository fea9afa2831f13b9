"""The workflows of GitHub: pinned actions, valid shell, and the checks of a pull request."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
CHECK = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
SCRIPTS = [
    pytest.param(step["run"], id=f"{workflow}-{job}-{index}")
    for workflow, jobs in JOBS.items()
    for job, body in jobs.items()
    for index, step in enumerate(body["steps"])
    if "run" in step
]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path):
    used = [line for line in path.read_text().splitlines() if re.match(r" +(- )?uses:", line)]
    assert used
    pinned = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
    assert [each for each in used if not pinned.search(each)] == [], "the version as comment"


@pytest.mark.parametrize("script", SCRIPTS)
def test_steps_are_valid_shell(script):
    assert "${{" not in script, "expressions come as variables, so that none is read as code"
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_script_of_ci_runs_on_pull_requests():
    # YAML reads the key `on` as a boolean.
    assert set(CHECK[True]) == {"pull_request", "push"}
    steps = [step.get("run", "") for body in CHECK["jobs"].values() for step in body["steps"]]
    scripts = {f".ci/{path.name}" for path in (ROOT / ".ci").iterdir()}
    assert scripts <= set(steps)


def test_code_of_a_pull_request_has_no_rights():
    assert CHECK["permissions"] == {"contents": "read"}
    assert not any("permissions" in body for body in CHECK["jobs"].values())


def test_the_hooks_run_before_a_commit_are_part_of_make_check():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    checked = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert [each for each in entries if each.removesuffix(" --force-exclude") not in checked] == []
