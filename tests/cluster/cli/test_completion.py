"""The scripts of `specdec completion`, run by their shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bin_dir(tmp_path):
    """Create a directory with the `specdec` command of this source tree."""
    command = tmp_path / "specdec"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cluster "$@"\n')
    command.chmod(0o755)
    return tmp_path


CANDIDATES = {
    "spec": "speculation",
    "speculation re": "reset",
    "serve --ing": "--ingress",
    "serve --ingress e": "embedded",
    "serve smol": "smollm2-135m-instruct",
    "bench serve --backend openai-": "openai-chat",
    "completion ": "bash zsh fish",
}
# Completes each line of stdin and prints the candidates on one line.
COMPLETE = """
source <(specdec completion bash)
while IFS= read -r line; do
    IFS=' ' read -ra COMP_WORDS <<< "specdec $line"
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _specdec_completion specdec < /dev/null
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_and_values(bin_dir):
    path = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        input="".join(f"{line}\n" for line in CANDIDATES),
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(zip(CANDIDATES, done.stdout.splitlines(), strict=True)) == CANDIDATES


@pytest.mark.parametrize(
    ("shell", "marks"),
    [
        ("bash", ["complete -o nosort -F _specdec_completion specdec"]),
        ("zsh", ["#compdef specdec", "_SPECDEC_COMPLETE=zsh_complete"]),
        ("fish", ["complete --no-files --command specdec", "_SPECDEC_COMPLETE=fish_complete"]),
    ],
)
def test_each_shell_has_its_script(shell, marks):
    result = CliRunner().invoke(main.main, ["completion", shell])
    assert result.exit_code == 0
    assert [mark for mark in marks if mark not in result.stdout] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


def test_other_shells_are_rejected():
    assert CliRunner().invoke(main.main, ["completion", "tcsh"]).exit_code == 2
