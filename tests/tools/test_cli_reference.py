"""The page of commands is the one that the commands make."""

from pathlib import Path

from tools.cli_reference import PAGE, main, reference

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_as_the_commands_are():
    assert (ROOT / PAGE).read_text() == reference(), "run `make cli-reference`"


def test_a_page_that_is_not_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / PAGE.parent).mkdir()
    assert main([]) == 0
    assert main(["check"]) == 0
    (tmp_path / PAGE).write_text("older\n")
    assert main(["check"]) == 1
    assert "make cli-reference" in capsys.readouterr().err
    assert main(["both", "at once"]) == 2
