"""The suggested commands name a program that the user's shell finds."""

import sys

import pytest

from cluster.serve.first_command import FIRST_PROMPT, command_name, first_command


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment's `specdec`, which is not on PATH."""
    program = tmp_path / "bin" / "specdec"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["bin/specdec", "serve"])
    return program


def test_off_path_the_command_is_the_one_that_was_called(installed):
    assert command_name() == "bin/specdec"
    shown = first_command("127.0.0.1:9000")
    assert shown.startswith("bin/specdec generate --address 127.0.0.1:9000 ")
    assert shown.endswith(f"'{FIRST_PROMPT}'")


def test_on_path_it_is_the_name(installed, monkeypatch):
    monkeypatch.setenv("PATH", f"{installed.parent}:/usr/bin")
    assert command_name() == "specdec"


def test_another_program_of_this_name_is_not_shown(installed, monkeypatch, tmp_path):
    other = tmp_path / "other" / "specdec"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert command_name() == "bin/specdec"


def test_a_module_is_called_by_its_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/cluster/__main__.py", "serve"])
    assert command_name() == f"{sys.executable} -m cluster"
