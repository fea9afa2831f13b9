"""Hooks of MkDocs: pages from outside docs/, and links to them. See mkdocs.yml."""

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
"""Pages of the site that lie elsewhere in the repository."""

_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds what does not lie under docs/."""
    for source, place in _PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    files.append(File.generated(config, GRPC_PAGE, content=proto_page(ROOT / "protos")))
    files.append(File.generated(config, "adr/index.md", content=_list_of_decisions()))
    return files


def _list_of_decisions() -> str:
    decisions = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = [(path.name, path.read_text().partition("\n")[0]) for path in decisions]
    entries = [f"- [{title.removeprefix('# ')}]({name})" for name, title in titles]
    return "\n".join(["# Decisions\n", *entries, ""])


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Leads links out of docs/ to pages of the site; those to other files become their names."""
    sources = {place: source for source, place in _PAGES.items()}
    place = page.file.src_uri
    source = sources.get(place, f"docs/{place}")
    is_page = frozenset(each.src_uri for each in files)

    def lead(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = _place_of(path)
        if path.startswith("docs/") and there not in is_page:
            return match.group(0)  # nothing is there: MkDocs says so
        if there not in is_page:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    return _LINK.sub(lead, markdown)


def _place_of(path: str) -> str:
    """Where on the site a file of the repository is, if it is there."""
    if path.endswith(".proto"):
        return GRPC_PAGE
    if path in ("README.md", "docs"):
        return "index.md"
    if path == "docs/adr":
        return "adr/index.md"
    return _PAGES.get(path, path.removeprefix("docs/"))
