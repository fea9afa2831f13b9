"""The layout: small folders with a purpose, no import cycle, tests by module, short functions."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePath

import pytest

grimp = pytest.importorskip("grimp", reason="needs import-linter: pip install -e '.[dev]'")

ROOT = Path(__file__).parent.parent
MAX_ENTRIES = {"specdec": 15, "cluster": 12}
MAX_ENTRIES_BELOW = 20
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_BENCHMARK_LINES = 12_000
GPU_KERNELS = ("specdec/kernels/triton/device/", "tools/gpu_kernels/")
LONG_FUNCTIONS = {  # at most 5
    "cluster/workers/groups/worker_group.py:__init__",
    "specdec/engine/engine.py:__init__",
    "specdec/kernels/triton/attention.py:_launch",
    "specdec/worker/head/runner.py:__init__",
}
MODULES = "# Modules: "  # the first lines of a test file of several modules, or of another's name
PACKAGES = sorted(
    path.parent for name in MAX_ENTRIES for path in (ROOT / name).rglob("__init__.py")
)


@pytest.mark.parametrize("name", MAX_ENTRIES)
def test_a_package_has_few_top_level_entries(name):
    entries = [path.name for path in (ROOT / name).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES[name], sorted(entries)


@cache
def tracked(*patterns: str) -> list[PurePath]:
    """Return the paths of the repository's files that match the patterns of `git ls-files`."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [PurePath(name) for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_every_folder_has_few_entries():
    entries = defaultdict(set)
    for path in tracked(*MAX_ENTRIES):
        for entry in (path, *path.parents[:-2]):
            entries[entry.parent].add(entry.name)
    assert {path: names for path, names in entries.items() if len(names) > MAX_ENTRIES_BELOW} == {}


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


def test_modules_have_no_import_cycle(imports):
    assert cycle(imports) == set()


def test_entries_of_a_folder_have_no_import_cycle(imports):
    cycles = {package: cycle(each) for package, each in imports_of_siblings(imports).items()}
    assert {package: names for package, names in cycles.items() if names} == {}


def test_a_cycle_is_detected():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert cycle(imports) == {"b", "c"}


def test_a_cycle_of_siblings_is_detected():
    imports = {"p.a.x": {"p.b.y"}, "p.a.z": set(), "p.b.y": set(), "p.b.w": {"p.a.z", "p.b"}}
    assert cycle(imports) == set()
    assert imports_of_siblings(imports) == {"p": {"a": {"b"}, "b": {"a"}}}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    graph = grimp.build_graph(*MAX_ENTRIES)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def imports_of_siblings(imports: Mapping[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """Return by package which of its entries import which others, with all that is in them."""
    found: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, names in imports.items():
        for name in names:
            ours, theirs = importer.split("."), name.split(".")
            pairs = zip(ours, theirs, strict=False)
            depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if 0 < depth < min(len(ours), len(theirs)):
                siblings = found[".".join(ours[:depth])]
                siblings[ours[depth]].add(theirs[depth])
                siblings[theirs[depth]]  # has an entry, even if it imports nothing
    return {package: dict(siblings) for package, siblings in found.items()}


def cycle(imports: Mapping[str, set[str]]) -> set[str]:
    """Return what imports each other, found by removing the leaves and then the roots."""
    while leaves := {name for name, imported in imports.items() if not imported}:
        imports = {
            name: imported - leaves for name, imported in imports.items() if name not in leaves
        }
    while roots := imports.keys() - {name for imported in imports.values() for name in imported}:
        imports = {name: imported for name, imported in imports.items() if name not in roots}
    return set(imports)


def test_every_module_has_a_test_file():
    """Its own, in the mirrored folder, or one whose first lines name it."""
    modules = {path for path in tracked("specdec/*.py", "cluster/*.py") if path.stem != "__init__"}
    own = {
        path for path in modules if (ROOT / "tests" / path.parent / f"test_{path.name}").exists()
    }
    named = {name for path in tracked("tests/**/test_*.py") for name in named_modules(path)}
    assert named <= {dotted(path) for path in modules}
    assert {dotted(path) for path in modules - own} <= named


def dotted(path: PurePath) -> str:
    return ".".join(path.with_suffix("").parts)


def named_modules(test_file: PurePath) -> list[str]:
    with (ROOT / test_file).open() as lines:
        named = takewhile(lambda line: line.startswith(MODULES), lines)
        return [name for line in named for name in line.removeprefix(MODULES).strip().split(", ")]


def test_no_file_is_long():
    lengths = {
        str(path): (ROOT / path).read_text().count("\n") for path in tracked("*.py", "*.cpp", "*.h")
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_benchmarks_have_few_lines():
    """A measurement that has served its decision goes; its figure stays in the ADR."""
    sources = tracked("benchmarks/*.py")
    lengths = [(ROOT / path).read_text().count("\n") for path in sources]
    assert sum(lengths) <= MAX_BENCHMARK_LINES


def test_no_function_is_long():
    """GPU kernels apart: a kernel is one function, since Triton passes no arrays between two."""
    sources = tracked("specdec/*.py", "cluster/*.py", "tools/*.py", "benchmarks/*.py")
    long = {
        f"{path}:{function.name}"
        for path in sources
        if not str(path).startswith(GPU_KERNELS)
        for function in functions(ROOT / path)
        if function.end_lineno - function.lineno >= MAX_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
