"""Names in docstrings: each module, class and function that one cites in backticks exists."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("specdec", "cluster")
PAGES = ("docs/architecture.md", "docs/methods.md")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w/]+\.(?:py|cpp|h|proto)")
DATA = re.compile(r"[\w/]+\.(?:json|safetensors|pt|md|toml)")
MODULE = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)+")
CALL = re.compile(r"((?:\w+\.)*\w+)\(\)")
CLASS = re.compile(r"(?:\w+\.)*[A-Z][a-z0-9]+[A-Z]\w*(?:\.\w+)*")
"""CamelCase with at least two humps; a member may follow."""

NATIVE_TYPE = re.compile(r"\b(?:enum class|struct|class|enum|using) (\w+)")
OTHERS = {
    "PreTrainedModel": "a class of transformers",
    "quant_state": "part of a tensor's name in checkpoints of bitsandbytes",
    "k_proj": "a layer whose scales stand in checkpoints",
    "v_proj": "a layer whose scales stand in checkpoints",
    "sglang": "the package",
    "SpeculationMethod": "an enum of protos/specdec/v1/inference.proto",
    "specdec.executors": "an entry point group",
    "specdec/speculation/proposers/NAME.py": "a file to add",
    "specdec/models/heads/formats/NAME.py": "a file to add",
    "specdec/models/heads/networks/NAME.py": "a file to add",
    "RuntimeEndpoint": "a class of SGLang",
}
"""Names that are not in the code, or first parts of such, and what they are."""


class Names(NamedTuple):
    """Names of a file's code, with "a.b" where an attribute of a variable a is read; docstrings."""

    defined: set[str]
    docstrings: list[str]


@cache
def sources() -> dict[Path, Names]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: _names(ast.parse(path.read_text())) for path in paths}


def _names(tree: ast.Module) -> Names:
    names = Names(set(), [])
    for node in ast.walk(tree):
        kind = type(node)
        if kind is ast.Name:
            names.defined.add(node.id)
        elif kind is ast.Attribute:
            names.defined.add(node.attr)
            if type(node.value) is ast.Name:
                names.defined.add(f"{node.value.id}.{node.attr}")
        elif kind is ast.arg or kind is ast.keyword:
            names.defined.add(node.arg or "")
        elif kind is ast.FunctionDef or kind is ast.AsyncFunctionDef or kind is ast.ClassDef:
            names.defined.add(node.name)
        elif kind is ast.alias:
            names.defined.update(node.name.split("."))
        elif kind is ast.Expr and type(node.value) is ast.Constant:
            names.docstrings.append(str(node.value.value))
    return names


@cache
def known_names() -> frozenset[str]:
    names = {*dir(builtins)}
    for path, found in sources().items():
        names |= found.defined | {*path.relative_to(ROOT).with_suffix("").parts}
    for path in files():
        if path.endswith((".h", ".cpp")):
            names |= {*NATIVE_TYPE.findall((ROOT / path[1:]).read_text())}
    return frozenset(names)


@cache
def files() -> frozenset[str]:
    found = [
        path
        for folder in (*PACKAGES, "benchmarks", "protos", "tests")
        for path in (ROOT / folder).rglob("*.*")
    ]
    found.extend(ROOT.glob("*.py"))
    return frozenset(f"/{path.relative_to(ROOT)}" for path in found if FILE.search(path.name))


@cache
def modules() -> frozenset[str]:
    """Return the dotted ends of the paths of all modules and folders, of two parts or more."""
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in sources()]
    paths += [parts[:-1] for parts in paths if parts[-1] == "__init__"]
    return frozenset(".".join(parts[i:]) for parts in paths for i in range(len(parts) - 1))


@cache
def folders() -> frozenset[str]:
    return frozenset(part for path in sources() for part in path.relative_to(ROOT).parts[:-1])


def is_missing(quoted: str) -> bool:
    """Return whether a text in backticks is a name of the project that does not exist."""
    if {quoted, quoted.split(".")[0]} & OTHERS.keys() or DATA.fullmatch(quoted):
        return False
    if FILE.fullmatch(quoted):
        return not any(path.endswith(f"/{quoted}") for path in files())
    if match := CALL.fullmatch(quoted):
        return not known_names().issuperset(match[1].split("."))
    if CLASS.fullmatch(quoted) or MODULE.fullmatch(quoted):
        return not _is_known(quoted.split("."))
    return False


def _is_known(parts: list[str]) -> bool:
    """Accept a module below a folder, or names that code has; both may be followed by names."""
    if parts[0] in folders() and len(parts) > 1:
        start = ".".join(parts[:2])
        if start not in modules() | known_names():
            return False
    return known_names().issuperset(parts)


def missing(text: str) -> list[str]:
    return [quoted for quoted in QUOTED.findall(text) if is_missing(quoted)]


def test_docstrings_name_what_exists():
    found = {
        str(path.relative_to(ROOT)): names
        for path, found_names in sources().items()
        if (names := [name for text in found_names.docstrings for name in missing(text)])
    }
    assert found == {}


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page):
    assert missing((ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    ("quoted", "expected"),
    [
        ("worker.device.state", False),
        ("worker.device_state", True),
        ("types.messages.StepRow", False),
        ("StepRow.drafting", False),
        ("StepRow.no_such_field", True),
        ("NoSuchClass", True),
        ("no_such_function()", True),
        ("device/steps.py", False),
        ("device_steps.py", True),
        ("x + 1", False),
    ],
)
def test_a_name_that_is_gone_is_found(quoted, expected):
    assert is_missing(quoted) == expected
