"""Fixtures for tests in a real Chromium; pages with console errors or external requests fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.scripted_fleet import running_fleet
from tests.e2e.conftest import free_ports

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/browser/"):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    """Chromium from the PATH, or from the path in the environment variable CHROMIUM."""
    reason = "needs playwright: pip install -e '.[dev]'"
    playwright_api = pytest.importorskip("playwright.sync_api", reason=reason)
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium on the PATH, or its path in CHROMIUM")
    with playwright_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def fleet(tiny_model_dir, tmp_path):
    with running_fleet(tiny_model_dir, tmp_path, free_ports(1)[0]) as running:
        yield running


class Visit:
    """A page at one URL, with its console errors and the hosts that it connected to."""

    def __init__(self, page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _on_console(self, message) -> None:
        # The browser logs error responses such as 409, even if the page handles them.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.errors.append(message.text)


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a page of a given size; asserts at the end that it has no errors.

    script: runs before those of the page.
    """

    @contextmanager
    def open_page(
        url: str, size: dict[str, int] = WIDE, script: str = "", **options: object
    ) -> Iterator[Visit]:
        context = browser.new_context(
            viewport=size, has_touch=size is NARROW, is_mobile=size is NARROW, **options
        )
        context.set_default_timeout(60_000)
        context.add_init_script(script)
        page = context.new_page()
        visit = Visit(page, url)
        try:
            page.goto(url + "/dashboard")
            yield visit
            assert visit.errors == []
            assert visit.hosts == {urlsplit(url).netloc}, "a request to another host"
        finally:
            context.close()

    return open_page
