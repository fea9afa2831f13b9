"""The pictures of docs/dashboard.md, with what each state has to show.

They are written where the environment variable PICTURES names a directory.
"""

import os
from pathlib import Path

import pytest

from specdec.client import SpeculationChange
from tests.browser.conftest import NARROW, WIDE
from tests.browser.pages import expect_text, set_load

MAX_BYTES = 60_000
BURSTS = [(4, 6), (6, 9), (0, 0), (5, 8), (8, 12), (6, 9)]
"""Requests per second and decoding requests of a replica, for eight seconds each."""


@pytest.fixture
def picture(tmp_path):
    """Writes a picture of a page with few colours; returns its size in bytes."""
    image_module = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install -e '.[dev]'")
    directory = Path(os.environ.get("PICTURES", tmp_path))

    def write(page, name):
        path = directory / f"dashboard-{name}.png"
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=path)
        with image_module.open(path) as image:
            few = image.convert("RGB").quantize(64)
        few.save(path, optimize=True)
        return path.stat().st_size

    return write


def test_pictures_of_each_state(fleet, visit, picture):
    sizes = []
    with (
        visit(fleet.url, WIDE, color_scheme="light") as light,
        visit(fleet.url, WIDE, color_scheme="dark") as dark,
        visit(fleet.url, NARROW, color_scheme="light") as phone,
    ):
        pages = [each.page for each in (light, dark, phone)]
        for page in pages:
            page.get_by_role("radio", name="1 min").check(force=True)
        for requests_per_s, num_decoding in BURSTS:
            set_load(fleet, requests_per_s, num_decoding, drafted_share=0.9)
            light.page.wait_for_timeout(8_000)
        expect_text(light.page.locator("#health"), "^Healthy$")
        expect_text(light.page.locator("#gain"), "1.9")
        sizes += [picture(light.page, "healthy"), picture(phone.page, "phone")]
        change = SpeculationChange(
            mode="off", updated_by="ada", reason="compare latency", ttl_s=3600.0
        )
        fleet.run(fleet.plane.set_speculation(change))
        expect_text(dark.page.locator("#gain"), "^no drafts$")
        expect_text(dark.page.locator("#change"), "^mode: off, expires after: 1 h$")
        dark.page.wait_for_timeout(8_000)
        sizes.append(picture(dark.page, "off"))
        fleet.replicas[0].failed.update(UNAVAILABLE=9, RESOURCE_EXHAUSTED=14)
        fleet.replicas[0].num_restarts = 1
        fleet.replicas[0].is_ready, fleet.replicas[0].num_decoding = False, 0
        expect_text(light.page.locator("#health"), "^Degraded: the model is starting again$")
        light.page.wait_for_timeout(4_000)
        sizes.append(picture(light.page, "recovering"))
    assert max(sizes) < MAX_BYTES, sizes
