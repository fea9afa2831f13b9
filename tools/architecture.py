"""Generate the file tables of docs/architecture.md from the docstrings of the modules.

python -m tools.architecture [check]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.generated_files import run

PAGE = Path("docs/architecture.md")
MARK = "<!-- The rest of this page is generated from docstrings by `make generate`. -->\n"
"""The line of the page above the tables."""

_PACKAGES = ("specdec", "cluster")
_MAX_NAMES = 4
_FIRST_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)")


def page() -> str:
    """Return the page: its text up to the mark, and the tables of all folders."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    folders = [folder for name in _PACKAGES for folder in _folders(Path(name))]
    return text + MARK + "".join(_table(folder) for folder in folders)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders with modules or C++ files, parents first."""
    folders = {path.parent for pattern in ("*.py", "*.cpp", "*.h") for path in root.rglob(pattern)}
    yield from sorted(folders, key=lambda path: path.parts)


def _table(folder: Path) -> str:
    rows = [_row(path) for path in sorted(folder.iterdir()) if _is_listed(path)]
    head = f"\n### `{folder}/`\n\n{_purpose(folder)}"
    return head + (
        "\n| file | content | defines |\n|---|---|---|\n" + "".join(rows) if rows else ""
    )


def _is_listed(path: Path) -> bool:
    return path.suffix in (".py", ".cpp", ".h") and path.name != "__init__.py"


def _purpose(folder: Path) -> str:
    init = folder / "__init__.py"
    if not init.exists():  # C++
        return ""
    return f"{_summary(ast.parse(init.read_text(encoding='utf-8')))}\n"


def _row(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return f"| `{path.name}` | {_first_comment(text)} | |\n"
    tree = ast.parse(text)
    names = ", ".join(f"`{name}`" for name in _names(tree))
    return f"| `{path.name}` | {_summary(tree)} | {names} |\n"


def _summary(tree: ast.Module) -> str:
    """Return the first line of a module's docstring, safe in a table."""
    docstring = ast.get_docstring(tree)
    assert docstring, "a module without a docstring"
    return docstring.partition("\n")[0].replace("|", r"\|")


def _names(tree: ast.Module) -> list[str]:
    """Return the public classes of a module, or its functions if it has no class."""
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    classes = [node.name for node in public if isinstance(node, ast.ClassDef)]
    return (classes or [node.name for node in public])[:_MAX_NAMES]


def _first_comment(text: str) -> str:
    """Return the first sentence of the comment that a C++ file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    comment = " ".join(lines).replace("|", r"\|")
    sentence = _FIRST_SENTENCE.match(comment)
    return sentence[1] if sentence else comment


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    return run({PAGE: page}, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
