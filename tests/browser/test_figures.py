"""Each figure of the page, computed here from the traffic that the scripted replicas have."""

import math
import re

import pytest

from specdec.client import SpeculationChange
from tests.browser.conftest import SIZES
from tests.browser.pages import set_load
from tests.browser.scripted_fleet import ACCEPTANCE, BOUNDS_S, LATENCY_SHARES, STEPS_PER_S

NUM_REPLICAS, REQUESTS_PER_S, DECODING, DRAFTED_SHARE, SPEEDUP = 2, 6.0, 12, 0.75, 1.9
K = len(ACCEPTANCE)
REACHED = [math.prod(ACCEPTANCE[:position]) for position in range(K)]  # of a draft
ACCEPTED = [math.prod(ACCEPTANCE[: position + 1]) for position in range(K)]
SEQUENCE_STEPS_PER_S = NUM_REPLICAS * STEPS_PER_S * DECODING
TOKENS_PER_S = SEQUENCE_STEPS_PER_S * (1 + DRAFTED_SHARE * sum(ACCEPTED))
ACCEPTANCE_RATE = sum(ACCEPTED) / K
FAILED = {"INTERNAL": 2, "UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 7, "INVALID_ARGUMENT": 4}
ERRORS, REJECTED, INVALID = 3, 7, 4
TOLERANCE = 0.04
"""Tolerance of rates: reports arrive every quarter of a second, in windows of three and ten."""

EXACT = 0.011
"""Three digits are shown."""


def percentile(share, first):
    """Return a percentile in ms, linear within the bucket that has it."""
    begin, end = 0.0, 0.0
    for index, part in enumerate(LATENCY_SHARES):
        begin, end = end, end + part
        if share <= end:
            low, high = BOUNDS_S[first + index - 1 : first + index + 1]
            return 1e3 * (low + (high - low) * (share - begin) / part)
    raise AssertionError("shares below 1")


FIRST_TOKEN, INTER_TOKEN = (
    [percentile(share, first) for share in (0.5, 0.95, 0.99)] for first in (4, 2)
)
P50 = 0.06
"""Tolerance of percentiles: a bucket has whole numbers of observations."""

TILES = {
    "Requests": [(REQUESTS_PER_S * NUM_REPLICAS, TOLERANCE), (2 * (DECODING + 1), 0)],
    "Decoding": [(2 * DECODING, 0), (2 * (DECODING - 8), 0)],
    "Throughput": [(TOKENS_PER_S, TOLERANCE)],
    "First token": [(FIRST_TOKEN[0], P50), (95, 0), (FIRST_TOKEN[1], P50)],
    "Inter-token": [(INTER_TOKEN[0], P50), (95, 0), (INTER_TOKEN[1], P50)],
    "Acceptance": [(100 * ACCEPTANCE_RATE, 0.02), (K, EXACT)],
    "KV cache": [(100 * DECODING / 40, EXACT)],
    "Memory": [(2 * 3, EXACT), (100 * 15 / 24, 0.02), (100 * 62 / 80, 0.02)],
}
LEGENDS = {
    "Requests": [(REQUESTS_PER_S * NUM_REPLICAS, 0.1)],
    "Batch": [(2 * DECODING, 0), (2 * (DECODING - 8), 0)],
    "Throughput": [(TOKENS_PER_S, 0.1)],
    "Failed requests": [(ERRORS, 0), (REJECTED, 0), (INVALID, 0)],
    "Time to first token": [(value, P50) for value in FIRST_TOKEN],
    "Inter-token latency": [(value, P50) for value in INTER_TOKEN],
    "Speed-up": [(SPEEDUP, EXACT)],
    "Drafts": [(100 * DRAFTED_SHARE, TOLERANCE), (100 * ACCEPTANCE_RATE, 0.02)],
    "Tokens per draft": [(K, EXACT), (1 + sum(ACCEPTED), EXACT)],
    "Memory": [(100 * DECODING / 40, EXACT), (100 * 15 / 24, 0.02), (100 * 62 / 80, 0.02)],
}
CARDS = {
    "health": [*[(value, 0) for value in (ERRORS, 1)]],
    "health-facts": [
        *[(value, 0) for value in (2, 2, ERRORS, REJECTED, 429, INVALID, 1)],
        *[(value, 0) for value in (1, 15)],
    ],
    "mode": [],
    "gain": [(SPEEDUP, EXACT)],
    "speculation-facts": [(100 * DRAFTED_SHARE, TOLERANCE), (1 + sum(ACCEPTED), EXACT)],
    "change": [(40, 0)],
}
REPLICA = [
    *[(value, 0) for value in (DECODING, DECODING + 1, DECODING - 8, 100 * DECODING / 40)],
    (3, EXACT),
    (62, EXACT),
]


def numbers(text):
    """Return the numbers of a text; 1.23k stands for 1230."""
    found = re.findall(r"(\d+(?:\.\d+)?)(k?)", text)
    return [float(number) * (1000 if unit else 1) for number, unit in found]


def check(name, text, expected):
    """Compare the numbers of a text with values and tolerances; there must be no other number."""
    shown = numbers(text)
    assert len(shown) == len(expected), (name, text)
    for number, (value, tolerance) in zip(shown, expected, strict=True):
        assert number == pytest.approx(value, rel=tolerance, abs=1e-9), (name, text, expected)


def texts_by_title(page, selector, title, values):
    return page.locator(selector).evaluate_all(
        "(all, [title, values]) => Object.fromEntries(all.map((each) => ["
        "each.querySelector(title).textContent,"
        "[...each.querySelectorAll(values)].map((value) => value.textContent).join(' ')]))",
        [title, values],
    )


@SIZES
def test_every_figure_is_that_of_the_traffic(fleet, visit, size):
    change = SpeculationChange(threshold=40)
    fleet.run(fleet.plane.set_speculation(change))
    set_load(fleet, REQUESTS_PER_S, DECODING, drafted_share=DRAFTED_SHARE, speedup=SPEEDUP)
    with visit(fleet.url, size) as opened:
        page = opened.page
        page.wait_for_timeout(13_000)  # the longest window of rates, and a few reports
        fleet.replicas[0].failed.update(FAILED)
        fleet.replicas[1].num_restarts = 1
        page.wait_for_timeout(2_500)
        tiles = texts_by_title(page, ".tile", "h2", ".value, .more")
        legends = texts_by_title(page, ".chart:has(.plot)", "h3", ".key b")
        cards = page.locator(".summary [id]:not(.card, #change-facts)").evaluate_all(
            "all => Object.fromEntries(all.map((each) => [each.id, each.textContent]))"
        )
        rows = page.locator("#replicas tr").evaluate_all(
            "all => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        bars = page.locator(".bars li").all_inner_texts()
    for shown, expected in ((tiles, TILES), (legends, LEGENDS), (cards, CARDS)):
        assert shown.keys() == expected.keys(), "a figure without a test"
        for name, text in shown.items():
            check(name, text, expected[name])
    for index, cells in enumerate(sorted(rows)):
        check(f"replica {index}", " ".join(cells[3:9]), REPLICA)
        assert cells[:2] == [f"replica-{index}", "ready"]
        assert cells[9] == str(index), "restarts"
        assert cells[10] in ("0", str(K)), "draft tokens of the last step"
        assert cells[12] == "1", "version"
    assert cards["mode"] == "Auto"
    check_positions([numbers(bar) for bar in bars])


def check_positions(bars):
    """Check acceptance by position, where each position has those of the one before."""
    assert [bar[0] for bar in bars] == list(range(1, K + 1))
    assert [bar[1] for bar in bars] == [pytest.approx(100 * each, abs=1) for each in ACCEPTANCE]
    drafts = bars[0][3]
    assert 9 <= drafts / (SEQUENCE_STEPS_PER_S * DRAFTED_SHARE) <= 20, "seconds of the last minute"
    for bar, reached, accepted in zip(bars, REACHED, ACCEPTED, strict=True):
        assert bar[2:] == pytest.approx([drafts * accepted, drafts * reached], rel=0.01)
