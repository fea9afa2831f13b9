"""Tests of the documentation: numbers of decisions, links, file names, and shown commands."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from cluster.cli.main import main
from cluster.serve.first_command import FIRST_PROMPT
from tests.shell_blocks import blocks_of, words_of

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
FOLDERS = ("*.md", "benchmarks/*.md", "docs/**/*.md", "deploy/**/*.md")
PAGES = [path for pattern in FOLDERS for path in ROOT.glob(pattern)]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
COMMANDS = [
    (f"{block.path.name}:{block.line}", words_of(command))
    for page in PAGES
    for block in blocks_of(page, "bash")
    for command in block.commands
]
CITATION = re.compile(r"docs/adr/(\d{4})\b")
SOURCE_FILE = re.compile(r"`([\w/]+\.(?:py|cpp|h))`")


def test_decisions_are_numbered_without_gaps():
    assert [int(path.name[:4]) for path in DECISIONS] == [*range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_the_heading_of_a_decision_has_its_number(path):
    assert path.read_text().startswith(f"# {int(path.name[:4])}. ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_have_existing_targets(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_source_files_that_the_architecture_names_exist():
    """Accept a path, or the end of one: tables give paths below the folder of their heading."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [f"/{path}" for path in listing.splitlines() if (ROOT / path).exists()]
    names = SOURCE_FILE.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(names) > 200
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in paths)] == []


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


def specdec_commands():
    for place, words in COMMANDS:
        if words and words[0] in ("specdec", ".venv/bin/specdec"):
            yield pytest.param(words[1:], id=f"{place} {' '.join(words[1:])[:60]}")


@pytest.mark.parametrize("words", list(specdec_commands()))
def test_commands_and_flags_exist(words):
    """Parse with click without running the command; the values of flags are checked too."""
    command, rest = main, words
    context = click.Context(main, info_name="specdec")
    while isinstance(command, click.Group):
        name, command, rest = command.resolve_command(context, rest)
        context = click.Context(command, info_name=name, parent=context)
    options = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)}
    assert given <= {*options, "--help", "-h"}


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shown = {word for _, words in COMMANDS if words[:1] == ["make"] for word in words[1:]}
    assert {word for word in shown if re.fullmatch(r"[a-z][a-z-]*", word)} <= targets


OPTIONS_OF_PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"][
    "ini_options"
]
LEFT_OUT = re.findall(r"not (\w+)", OPTIONS_OF_PYTEST["addopts"])
"""Markers of the tests that no command runs by default."""


def test_each_marker_is_explained_and_one_left_out_by_default_names_a_target_that_runs_it():
    page = (ROOT / "docs" / "development.md").read_text()
    rows = dict(re.findall(r"^\| marker `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert [*rows] == [each.partition(":")[0] for each in OPTIONS_OF_PYTEST["markers"]]
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^([a-z-]+):.* ## .*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    for name in LEFT_OUT:
        [target] = re.findall(r"`make ([a-z-]+)`", rows[name])
        [arguments] = re.findall(rf" -m (?:{name}|'slow or not slow') (.*)", recipes[target])
        paths = re.findall(r"tests[\w/.]*", arguments) or ["tests"]
        marks = [each for path in paths for _, each in marks_below(ROOT / path)]
        assert any(f"mark.{name}" in each for each in marks), target


def marks_below(path):
    """Yield the path, the name and the marks of each test, those of its folder included."""
    for file in [path] if path.is_file() else path.rglob("test_*.py"):
        conftest = file.parent / "conftest.py"
        added = re.findall(r"add_marker\((.*)\)", conftest.read_text() if conftest.exists() else "")
        tree = ast.parse(file.read_text())
        of_file = [ast.unparse(each) for each in tree.body if isinstance(each, ast.Assign)]
        marks = " ".join([*added, *(each for each in of_file if each.startswith("pytestmark"))])
        for each in tree.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = " ".join(map(ast.unparse, each.decorator_list))
                yield f"{file.relative_to(ROOT)} {each.name}", marks + decorators


INLINE_PYTEST = re.compile(r"`[^`\n]*\bpytest [^`\n]*\btests/[^`\n]*`")
SHOWN_TEST = re.compile(
    r"`(?:python -m )?pytest(?: -s)?( -m slow)?(?: -s)? (tests/[\w./]+)(?: -k (\w+))?`"
)
SHOWN_TESTS = [
    pytest.param(command, id=f"{page.name} {command.strip('`')}")
    for page in PAGES
    for command in INLINE_PYTEST.findall(page.read_text())
]


@pytest.mark.parametrize("command", SHOWN_TESTS)
def test_shown_tests_are_selected(command):
    shown = SHOWN_TEST.fullmatch(command)
    assert shown, "a form of command that this test does not read"
    slow, path, word = shown.groups()
    found = [marks for name, marks in marks_below(ROOT / path) if (word or "test_") in name]
    assert any(("mark.slow" in marks) == bool(slow) for marks in found)


TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SECURITY = (ROOT / "docs" / "security.md").read_text()
"""The threat model, whose tables name the tests of their statements."""


def functions_of(path):
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_tests_that_the_threat_model_names_exist():
    named = TEST_ID.findall(SECURITY)
    assert len(named) > 90
    assert SECURITY.count("::") == len(named), "a name that is not a test's"
    assert all(name.startswith("test_") for _, name in named)
    functions = {path: functions_of(path) for path, _ in named}
    assert [each for each in named if each[1] not in functions[each[0]]] == []


def test_each_statement_of_the_threat_model_names_a_test():
    tables = re.findall(r"((?:^\|.*\n)+)", SECURITY, re.MULTILINE)
    tested = [each.splitlines() for each in tables if each.splitlines()[0].endswith("tested by |")]
    assert len(tested) >= 9
    statements = [row for _, _, *rows in tested for row in rows]
    assert [row for row in statements if not TEST_ID.search(row.rsplit(" | ", 1)[-1])] == []


LINK_TO_COMMAND = "install.md#the-command"
OF_DEVELOPERS = {".venv/bin/buf"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_programs_exist_where_a_reader_has_followed_the_page(page):
    """`specdec` needs an active environment, and buf `make setup`."""
    text = page.read_text()
    commands = [command for block in blocks_of(page, "bash") for command in block.commands]
    programs = {words[0] for command in commands if (words := words_of(command))}
    assert "specdec" not in programs or LINK_TO_COMMAND in text or page.name == "install.md"
    installed = {each for each in programs if each.startswith(".venv/bin/")}
    assert installed <= {".venv/bin/specdec", ".venv/bin/pip", ".venv/bin/python", *OF_DEVELOPERS}
    assert not installed & OF_DEVELOPERS or "`make setup` installs `buf`" in text


def test_nothing_is_installed_by_a_name_that_no_index_has():
    """Until a release, pip needs a file: `pip install dist/specdec-...`."""
    sources = (path for folder in ("specdec", "cluster") for path in (ROOT / folder).rglob("*.py"))
    named = re.compile(r"pip install [^`\n]*(?<![\w/.-])specdec\b")
    files = [*PAGES, ROOT / "docs" / "notebook.ipynb", *sources]
    assert [path.name for path in files if named.search(path.read_text())] == []


def test_the_first_prompt_is_the_same_everywhere():
    dashboard = "cluster/api/dashboard/static/index.html"
    for name in ("README.md", "docs/index.md", dashboard):
        assert FIRST_PROMPT in (ROOT / name).read_text(), name


def test_pages_name_wheels_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name for page in PAGES for name in re.findall(r"dist/(specdec\S*?)-py3", page.read_text())
    }
    assert named == {f"specdec-{project['version']}", f"specdec_client-{project['version']}"}
