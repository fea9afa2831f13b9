"""Tests that docs/cli-reference.md is up to date with the commands."""

from pathlib import Path

from tools.cli_reference import PAGE, main, reference

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date():
    assert (ROOT / PAGE).read_text() == reference(), "run `make generate`"


def test_an_outdated_page_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / PAGE.parent).mkdir()
    assert main([]) == 0
    assert main(["check"]) == 0
    (tmp_path / PAGE).write_text("older\n")
    assert main(["check"]) == 1
    assert "make generate" in capsys.readouterr().err
    assert main(["both", "at once"]) == 2
