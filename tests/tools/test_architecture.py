"""The file tables of docs/architecture.md are up to date and have every module."""

import subprocess
from pathlib import Path

from tools import architecture

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert architecture.PAGE.read_text() == architecture.page(), "run `make generate`"


def test_every_file_has_a_row_below_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    _, _, tables = architecture.page().partition(architecture.MARK)
    rows, folder = set(), ""
    for line in tables.splitlines():
        if line.startswith("### `"):
            folder = line.removeprefix("### `").rstrip("`")
        elif line.startswith("| `"):
            rows.add(folder + line.split("`")[1])
    patterns = [
        f"{name}/**/*.{suffix}" for name in ("specdec", "cluster") for suffix in ["py", "cpp", "h"]
    ]
    listing = subprocess.run(
        ["git", "ls-files", "--", *(f":(glob){each}" for each in patterns)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = {path for path in listing if Path(path).exists() and not path.endswith("__init__.py")}
    assert rows == files


def test_a_row_has_the_summary_and_the_public_classes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("specdec", "cluster"):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text('"""A package."""\n')
    Path("specdec/trees.py").write_text(
        '"""Trees | more.\n\nText.\n"""\nclass Tree: ...\nclass _A: ...\n'
    )
    Path("specdec/sum.h").write_text(
        "// Sums of rows, and\n// of columns. More text.\n#pragma once\n"
    )
    Path("docs").mkdir()
    architecture.PAGE.write_text(f"# Architecture\n{architecture.MARK}older\n")
    assert architecture.main(["check"]) == 1
    assert architecture.main([]) == 0
    page = architecture.PAGE.read_text()
    assert page.startswith(f"# Architecture\n{architecture.MARK}\n### `specdec/`\n\nA package.\n")
    assert "| `trees.py` | Trees \\| more. | `Tree` |\n" in page
    assert "| `sum.h` | Sums of rows, and of columns. | |\n" in page
