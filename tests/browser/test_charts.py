"""Charts: steps without slopes, gaps, time labels and legends that are not cut."""

import json
import time

import httpx
import pytest

from tests.browser.conftest import NARROW, SIZES
from tests.browser.pages import chart, expect_text, legend, set_load, tile

RECORD_DRAWING = """
window.slopes = 0;
window.labels = new Map();
const last = new WeakMap();
for (const name of ["moveTo", "lineTo"]) {
  const draw = Path2D.prototype[name];
  Path2D.prototype[name] = function (x, y) {
    const [oldX, oldY] = last.get(this) ?? [x, y];
    if (name === "lineTo" && Math.abs(x - oldX) > 0.01 && Math.abs(y - oldY) > 0.01) slopes += 1;
    last.set(this, [x, y]);
    return draw.call(this, x, y);
  };
}
const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  labels.set(this.canvas, []);
  return clearRect.apply(this, box);
};
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  labels.get(this.canvas)?.push(text);
  return fillText.call(this, text, ...place);
};
"""
"""Counts lines that are neither horizontal nor vertical, and keeps the texts of each canvas."""

COLOURED_COLUMNS = """([title, x0, x1]) => {
  const element = [...document.querySelectorAll(".chart")]
    .find((each) => each.querySelector("h3").textContent === title);
  const canvas = element.querySelector("canvas");
  const over = element.querySelector(".u-over");
  const scale = canvas.width / canvas.getBoundingClientRect().width;
  const left = over.getBoundingClientRect().left - canvas.getBoundingClientRect().left;
  const width = over.clientWidth;
  const begin = Math.round(scale * (left + x0 * width));
  const end = Math.round(scale * (left + x1 * width));
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(begin, 0, end - begin, canvas.height);
  const columns = new Set();
  for (let index = 0; index < data.length; index += 4) {
    const [red, green, blue, alpha] = data.slice(index, index + 4);
    if (alpha > 128 && blue - red > 60) columns.add((index / 4) % (end - begin));
  }
  return columns.size / (end - begin);
}"""
"""Returns the share of the columns of a part of a chart in which its first line is drawn."""


@SIZES
def test_traffic_that_stops_and_starts_is_drawn_without_slopes(fleet, visit, size):
    with visit(fleet.url, size, script=RECORD_DRAWING) as opened:
        page = opened.page
        for load in (6, 0, 6, 0):
            set_load(fleet, load, load)
            time.sleep(5)
        assert [legend(page, name) for name in ("Requests", "Throughput")] == [["0"], ["0"]]
        expect_text(tile(page, "Throughput"), "^[1-9]")  # of ten seconds
        assert page.evaluate("slopes") == 0


def recorded(fleet):
    """Return the events of a page, with their data."""
    with httpx.stream("GET", f"{fleet.url}/dashboard/events", timeout=5) as response:
        lines = [line for line, _ in zip(response.iter_lines(), range(6), strict=False)]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]


def test_an_idle_service_has_steps_and_one_that_does_not_answer_a_gap(fleet, visit):
    """Samples 30 s apart, then 120 s without any: of a span of 300 s."""
    set_load(fleet)
    time.sleep(3)
    hello, now = recorded(fleet)
    now_s = now["figures"][-1]["time_s"]
    seconds = [*range(-300, -149, 30), *range(-30, 1)]
    samples = [{**now["figures"][-1], "time_s": now_s + second} for second in seconds]
    for index, sample in enumerate(samples):
        sample["generated_per_s"] = sample["num_decoding"] = 100 if index % 2 else 50
    now["figures"] = samples
    body = "".join(
        f"event: {name}\ndata: {json.dumps(data)}\n\n"
        for name, data in (("hello", hello), ("now", now))
    )
    with visit(fleet.url, script=RECORD_DRAWING) as opened:
        page = opened.page
        page.route("**/events", lambda route: route.fulfill(body=body))
        page.reload()
        expect_text(chart(page, "Throughput").locator("b"), "^[1-9]")
        assert page.evaluate("slopes") == 0
        for title in ("Throughput", "Batch"):
            share = [
                page.evaluate(COLOURED_COLUMNS, [title, *part])
                for part in ((0.05, 0.45), (0.55, 0.85), (0.92, 0.99))
            ]
            assert share == [pytest.approx(1, abs=0.05), 0, pytest.approx(1, abs=0.05)], title


@SIZES
@pytest.mark.parametrize("span", ["1 min", "5 min", "15 min"])
def test_each_chart_has_several_time_labels(fleet, visit, size, span):
    set_load(fleet)
    with visit(fleet.url, size, script=RECORD_DRAWING) as opened:
        page = opened.page
        page.get_by_role("radio", name=span, exact=True).check(force=True)
        expect_text(tile(page, "Throughput"), "^[1-9]")
        texts = page.evaluate(
            "[...document.querySelectorAll('.chart canvas')].map((each) => labels.get(each))"
        )
        times = [[text for text in each if text.count(":") in (1, 2)] for each in texts]
        assert len(times) == 10
        assert all(2 <= len(each) <= 7 for each in times), times


def test_the_longest_legend_fits_a_phone(fleet, visit):
    set_load(fleet)
    with visit(fleet.url, NARROW) as opened:
        page = opened.page
        expect_text(chart(page, "Inter-token latency").locator("b").nth(2), "9[0-9.]+ ms")
        page.locator(".key b").evaluate_all("all => all.forEach((b) => b.textContent = '88.8 ms')")
        cut = page.locator(".keys").evaluate_all(
            "all => all.filter((keys) => [...keys.children].some((key) =>"
            " key.getBoundingClientRect().right > keys.getBoundingClientRect().right"
            " || key.getBoundingClientRect().bottom > keys.getBoundingClientRect().bottom))"
            ".map((keys) => keys.textContent)"
        )
        assert cut == []


@SIZES
def test_no_text_of_a_tile_or_card_is_cut(fleet, visit, size):
    set_load(fleet, requests_per_s=1234.0, num_decoding=3000)
    codes = ("INTERNAL", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    for replica in fleet.replicas:
        used = replica.memory
        replica.memory = type(used)(999 << 30, 100, 100, 80, 80)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Throughput"), "^[1-9]")
        expect_text(page.locator(".tile", has_text="Memory"), "node 100 %, GPU 100 %")
        fleet.replicas[0].failed.update(dict.fromkeys(codes, 88_800))
        expect_text(page.locator("#health-facts"), "88.8k errors")
        cut = page.locator(".tile :is(h2, .value, .more), .card > *").evaluate_all(
            "all => all.filter((each) => each.scrollWidth > each.clientWidth)"
            ".map((each) => each.textContent)"
        )
        assert cut == []
