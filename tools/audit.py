"""Audits the pinned dependencies for known vulnerabilities, with pip-audit.

    python -m tools.audit [--if-available] [OPTIONS OF pip-audit]

pip-audit reads the advisories from the JSON documents of the package index, and reports success if
the index has none, as many mirrors do. So a release with known advisories is audited too: unless
they are found, the advisories are not available, and the audit fails, or with --if-available is
skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONSTRAINTS = Path("constraints.txt")
CONTROL_NAME, CONTROL_VERSION = "django", "2.0"
"""A release with advisories, which is not a dependency."""

IF_AVAILABLE = "--if-available"


class NoAdvisoriesError(Exception):
    """The advisories are not available. `str()` is the reason."""


@dataclass(frozen=True)
class Finding:
    """A package with known vulnerabilities, or one that the audit could not look up."""

    package: str
    problem: str

    def __str__(self) -> str:
        return f"{self.package}: {self.problem}"


def findings_of(report: dict[str, Any]) -> list[Finding]:
    """Return what pip-audit's report finds, without the control.

    Raises NoAdvisoriesError if the report does not find the control's advisories.
    """
    found = [each for entry in report["dependencies"] for each in _findings(entry)]
    control = f"{CONTROL_NAME} {CONTROL_VERSION}"
    if control not in [each.package for each in found]:
        raise NoAdvisoriesError(f"it has none for {control}, which has known vulnerabilities")
    return [each for each in found if each.package != control]


def _findings(entry: dict[str, Any]) -> list[Finding]:
    if "skip_reason" in entry:
        return [Finding(entry["name"], entry["skip_reason"])]
    return [
        Finding(f"{entry['name']} {entry['version']}", f"{each['id']}, {_fix(each)}")
        for each in entry["vulns"]
    ]


def _fix(vulnerability: dict[str, Any]) -> str:
    versions = vulnerability["fix_versions"]
    return f"fixed in {', '.join(versions)}" if versions else "not fixed yet"


def audit(constraints: Path, options: Sequence[str]) -> list[Finding]:
    """Audit the pinned versions. Raises NoAdvisoriesError if the advisories are not available."""
    with tempfile.TemporaryDirectory() as directory:
        control = Path(directory) / "control.txt"
        control.write_text(f"{CONTROL_NAME}=={CONTROL_VERSION}\n")
        files = ["--requirement", str(constraints), "--requirement", str(control)]
        command = [sys.executable, "-m", "pip_audit", *files, "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", *options]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        lines = done.stderr.strip().splitlines() or ["pip-audit printed no report"]
        raise NoAdvisoriesError(lines[-1]) from error
    return findings_of(report)


def main(arguments: Sequence[str]) -> int:
    """Run the audit and print its result. Return 0, or 1 if it fails or finds something."""
    is_optional = IF_AVAILABLE in arguments
    options = [each for each in arguments if each != IF_AVAILABLE]
    try:
        findings = audit(CONSTRAINTS, options)
    except NoAdvisoriesError as error:
        outcome = "skipped" if is_optional else "failed"
        print(f"audit {outcome}: nothing was audited, since the package index serves no advisories")
        print(f"reason: {error}")
        return 0 if is_optional else 1
    for each in findings:
        print(each)
    print(f"audited {CONSTRAINTS}: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
