"""The files for contributors: their links, targets and commands exist."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cluster.cli import main

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    local = [each for each in links if not each.startswith("https://")]
    assert local
    assert [each for each in local if not (ROOT / each).exists()] == []


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z-]+)", PAGES[0].read_text()))
    assert {"setup", "test", "check"} < named
    assert [each for each in named if f"\n{each}:" not in makefile] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_form_of_an_issue_is_complete(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    ids = [each["id"] for each in form["body"]]
    assert len(ids) == len(set(ids))
    assert any(each.get("validations", {}).get("required") for each in form["body"])


def test_commands_in_the_forms_exist():
    text = "".join(path.read_text() for path in TEMPLATES) + PAGES[1].read_text()
    commands = set(re.findall(r"`specdec ([a-z]+)", text))
    assert commands >= {"doctor", "version"}
    for command in commands:
        assert CliRunner().invoke(main.main, [command, "--help"]).exit_code == 0, command
