"""The layout: few folders, each with a purpose, and no import cycle between modules."""

import ast
import re
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="needs import-linter: pip install -e '.[dev]'")

ROOT = Path(__file__).parent.parent
MAX_ENTRIES = {"specdec": 15, "cluster": 12}
PACKAGES = sorted(
    path.parent for name in MAX_ENTRIES for path in (ROOT / name).rglob("__init__.py")
)


@pytest.mark.parametrize("name", MAX_ENTRIES)
def test_a_package_has_few_top_level_entries(name):
    entries = [path.name for path in (ROOT / name).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES[name], sorted(entries)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_documents_its_purpose_in_one_paragraph(package):
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert docstring, "no docstring"
    summary, _, paragraph = docstring.partition("\n\n")
    assert "\n" not in summary
    assert "\n\n" not in paragraph, "more than one paragraph"


@pytest.mark.parametrize("name", MAX_ENTRIES)
def test_every_folder_with_modules_is_a_package(name):
    folders = {path.parent for path in (ROOT / name).rglob("*.py")}
    assert folders <= set(PACKAGES)


def test_only_tests_of_benchmarks_import_them():
    imports = re.compile(r"^\s*(from|import) benchmarks\b", re.MULTILINE)
    tests = set((ROOT / "tests").rglob("*.py")) - set((ROOT / "tests/benchmarks").iterdir())
    assert [path for path in tests if imports.search(path.read_text())] == []


def test_modules_have_no_import_cycle():
    assert import_cycles(grimp.build_graph(*MAX_ENTRIES)) == []


def test_a_cycle_is_detected():
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert import_cycles(graph) == [{"b", "c"}]


def import_cycles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Return the groups of modules that import each other, found by removing the leaves."""
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while leaves := {name for name, imported in imports.items() if not imported}:
        imports = {
            name: imported - leaves for name, imported in imports.items() if name not in leaves
        }
    while imports:
        importers = {name for imported in imports.values() for name in imported}
        roots = imports.keys() - importers
        if not roots:
            return [set(imports)]
        imports = {name: each for name, each in imports.items() if name not in roots}
    return []
