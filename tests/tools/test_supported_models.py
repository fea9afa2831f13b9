"""Tests that docs/models.md is up to date with the registry, and lists what is tested."""

from pathlib import Path

from specdec.models.config.registry import ARCHITECTURES
from tools.supported_models import PAGE, main, page

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date():
    assert (ROOT / PAGE).read_text() == page(), "run `make generate`"


def test_every_architecture_has_a_row():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    named = {line.split("`")[1] for line in rows}
    assert named == set(ARCHITECTURES)


def test_an_outdated_page_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert main(["check"]) == 0
    (tmp_path / PAGE).write_text("older\n")
    assert main(["check"]) == 1
    assert "make generate" in capsys.readouterr().err
