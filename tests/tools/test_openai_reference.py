"""Tests that docs/openai-reference.md is up to date with the schema, and complete."""

from pathlib import Path

import pytest

from tools.openai_reference import PAGE, SECTIONS, main, own_fields, page

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date():
    assert (ROOT / PAGE).read_text() == page(), "run `make generate`"


@pytest.mark.parametrize("model", SECTIONS.values(), ids=lambda model: model.__name__)
def test_every_field_has_a_description_that_fits_a_table(model):
    for name, field in own_fields(model).items():
        assert field.description, name
        assert "|" not in field.description


def test_an_outdated_page_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / PAGE.parent).mkdir()
    assert main([]) == 0
    assert main(["check"]) == 0
    (tmp_path / PAGE).write_text("older\n")
    assert main(["check"]) == 1
    assert "make generate" in capsys.readouterr().err
