"""MkDocs hooks that add pages from outside docs/ and rewrite links to them. See mkdocs.yml."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.proto_page import proto_page

ROOT = Path(__file__).parents[2]
GRPC_PAGE = "reference/grpc.md"

_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    "benchmarks/README.md": "benchmarks/code.md",
}
"""Files outside docs/ that become pages: path in the repository to path on the site."""

_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not under docs/."""
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, GRPC_PAGE, content=proto_page(ROOT / "protos")))
    files.append(File.generated(config, "adr/index.md", content=_decision_index()))
    return files


def _decision_index() -> str:
    decisions = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = [(path.name, path.read_text().partition("\n")[0]) for path in decisions]
    entries = [f"- [{title.removeprefix('# ')}]({name})" for name, title in titles]
    return "\n".join(["# Decisions\n", *entries, ""])


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/ to pages of the site, or to plain paths for other files."""
    sources = {target: source for source, target in _PAGES.items()}
    current = page.file.src_uri
    source = sources.get(current, f"docs/{current}")
    pages = frozenset(file.src_uri for file in files)

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = _page_of(path)
        if path.startswith("docs/") and target not in pages:
            return match.group(0)  # a dead link, which MkDocs reports
        if target not in pages:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(current) or '.')}{anchor})"

    return _LINK.sub(rewrite, markdown)


def _page_of(path: str) -> str:
    """Return the page of the site that a file of the repository would have."""
    if path.endswith(".proto"):
        return GRPC_PAGE
    if path in ("README.md", "docs"):
        return "index.md"
    if path == "docs/adr":
        return "adr/index.md"
    return _PAGES.get(path, path.removeprefix("docs/"))
