"""The documents: decisions have a number each, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
FOLDERS = ("*.md", "benchmarks/*.md", "docs/**/*.md", "deploy/**/*.md")
PAGES = [path for pattern in FOLDERS for path in ROOT.glob(pattern)]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
CITATION = re.compile(r"docs/adr/(\d{4})\b")


def test_decisions_are_numbered_without_gaps():
    assert [int(path.name[:4]) for path in DECISIONS] == [*range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_is_headed_by_its_number(path):
    assert path.read_text().startswith(f"# {int(path.name[:4])}. ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_code_cites_decisions_that_exist():
    numbers = {path.name[:4] for path in DECISIONS}
    code = [
        path
        for folder in ("specdec", "cluster", "benchmarks", "tests")
        for pattern in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / folder).rglob(pattern)
    ]
    assert [
        (path.name, number)
        for path in code
        for number in CITATION.findall(path.read_text())
        if number not in numbers
    ] == []
