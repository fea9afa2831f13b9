"""Tests of the systemd unit with systemd-analyze."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path("deploy/systemd/specdec.service")
MOST_EXPOSED = 3.0
"""Limit of the exposure level of `systemd-analyze security`, out of 10; 9.6 is the default."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze on the path"
)


def analyze(*arguments):
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_accepts_every_directive(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"/opt/specdec/bin/specdec", "/bin/true", UNIT.read_text()))
    assert analyze("verify", "--man=no", str(unit)) == ""


@needs_systemd
def test_it_is_hardened():
    report = analyze("security", "--offline=true", str(UNIT))
    exposure = float(re.search(r"exposure level for specdec.service: ([\d.]+)", report)[1])
    assert exposure <= MOST_EXPOSED, report
