"""Tests of the dashboard in a real Chromium, with the real control plane and scripted replicas."""

import re

import pytest

from specdec.client import SpeculationChange
from tests.browser.conftest import AXE, SIZES
from tests.browser.pages import expect_text, set_load, set_mode, tile
from tests.browser.scripted_fleet import ACCEPTANCE, running_fleet
from tests.e2e.conftest import free_ports

TOKEN = "a-token-of-operators"

CHARTS = "() => [...document.querySelectorAll('.chart canvas')].map((each) => each.toDataURL())"
ALL_CHARTS_DIFFER = f"""(before) => {{
  const images = ({CHARTS})();
  return images.length === before.length && images.every((image, at) => image !== before[at]);
}}"""
WIDTHS_ARE_CLOSE_TO = """(shares) => {
  const bars = [...document.querySelectorAll(".bars .bar")];
  const widths = bars.map((bar) => bar.offsetWidth / bar.parentElement.offsetWidth);
  const isClose = (share, index) => Math.abs(widths[index] - share) <= 0.02;
  return widths.length === shares.length && shares.every(isClose);
}"""


@SIZES
def test_mode_off_is_shown_in_every_part(fleet, visit, size):
    set_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        expect_text(page.locator("#mode"), "^Auto$")
        set_mode(page, "Off")
        expect_text(page.locator("#preview"), r"this means no drafts")
        page.get_by_label("Your name").fill("ada")
        page.get_by_label("Reason").fill("load test")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#speculation-card"), "Off: no drafts.*turned off")
        expect_text(page.locator("#change-card"), "mode: off.*ada.*load test")
        expect_text(page.locator("#replicas tr").first, "0set by an operator")
        expect_text(page.locator("#audit li").first, r"mode.*off.*version 1, ada: load test")
        expect_text(page.locator("#decisions li").first, "no drafts")
        expect_text(page.locator("#control-version"), "Version 1 · ada")
    state = fleet.run(fleet.plane.speculation())
    assert (state.in_force.mode, state.updated_by, state.reason) == ("off", "ada", "load test")


@SIZES
def test_charts_and_tiles_update_under_load(fleet, visit, size):
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Throughput"), r"^0 ")
        before = page.evaluate(f"({CHARTS})()")
        set_load(fleet)
        expect_text(tile(page, "Throughput"), r"^[1-9][\d.]*k? tokens/s")
        expect_text(tile(page, "Requests"), r"^[1-9]")
        expect_text(tile(page, "First token"), r"^9[\d.]+ ms")
        expect_text(tile(page, "Acceptance"), r"^\d\d %")
        expect_text(page.locator(".chart", has_text="Speed-up").locator("b"), r"\d\S")
        assert len(before) == 10
        page.wait_for_function(ALL_CHARTS_DIFFER, arg=before)
        page.wait_for_function(WIDTHS_ARE_CLOSE_TO, arg=ACCEPTANCE)


@SIZES
def test_rules_are_previewed_applied_and_removed(fleet, visit, size):
    set_load(fleet, requests_per_s=10.0)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Requests"), r"^(1[5-9]|2\d)")
        page.get_by_role("button", name="Add a rule").click()
        page.get_by_label("from (/s)").fill("5")
        page.get_by_label("mode", exact=True).select_option("on")
        page.get_by_label("tokens", exact=True).fill("3")
        expect_text(page.locator("#preview"), r"\d requests/s.* means k = 3\. Rule 1 applies")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#mode"), "^On, k = 3 by rule 1$")
        expect_text(page.locator("#preview"), r"Rule 1 applies")
        # The rule does not change the mode that is set in the form.
        assert page.get_by_role("radio", name="Auto", exact=True).is_checked()
        page.get_by_role("button", name=re.compile("Remove the rule from 5")).click()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#mode"), "^Auto$")
    assert fleet.run(fleet.plane.speculation()).rules == ()


def test_an_invalid_value_is_marked_at_its_input(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.get_by_label("Threshold").fill("9999")
        expect_text(page.locator("#control-error"), "threshold is 9999; it must be .* 0 to 4096")
        assert page.get_by_label("Threshold").get_attribute("aria-invalid") == "true"
        page.get_by_role("button", name="Discard").click()
        expect_text(page.locator("#control-error"), "^$")
        assert page.get_by_label("Threshold").input_value() == "32"


def test_a_conflict_names_the_other_operator_and_keeps_both_changes(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.get_by_label("Threshold").fill("8")
        change = SpeculationChange(mode="off", updated_by="grace", reason="incident 12")
        fleet.run(fleet.plane.set_speculation(change))
        conflict = "grace changed this at .*incident 12.*mode is off"
        expect_text(page.locator("#conflict-text"), conflict)
        page.get_by_role("button", name="Keep my changes").click()
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
        assert page.get_by_label("Threshold").input_value() == "8"
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#control-version"), "Version 2")
    state = fleet.run(fleet.plane.speculation())
    assert (state.in_force.mode, state.in_force.threshold) == ("off", 8)


def test_edits_made_while_a_change_is_being_applied_are_kept(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")

        def edit_meanwhile(route):
            if route.request.method == "PUT":
                page.evaluate("() => document.querySelector('[name=mode][value=off]').click()")
            route.continue_()

        page.route("**/v1/admin/speculation", edit_meanwhile)
        set_mode(page, "On")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#control-version"), "Version 1")
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#control-version"), "Version 2")
    assert fleet.run(fleet.plane.speculation()).in_force.mode == "off"


def test_a_change_by_another_operator_between_two_events_is_a_conflict(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.context.route("**/dashboard/events", lambda route: route.abort())
        set_mode(page, "On")

        def apply_another_change(route):
            if route.request.method == "PUT":
                change = SpeculationChange(mode="off", updated_by="bob")
                fleet.run(fleet.plane.set_speculation(change))
            route.continue_()

        page.route("**/v1/admin/speculation", apply_another_change)
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#conflict-text"), "bob changed this")
        page.get_by_role("button", name="Discard my changes").click()
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
    assert fleet.run(fleet.plane.speculation()).in_force.mode == "off"


@SIZES
def test_the_output_distinguishes_accepted_draft_tokens(fleet, visit, size):
    with visit(fleet.url, size) as opened:
        page = opened.page
        page.get_by_label("Max tokens").fill("60")
        page.get_by_role("button", name="Generate").click()
        figures = r"60 tokens .* tokens/s .* acceptance rate .*reached max tokens"
        expect_text(page.locator("#try-figures"), figures)
        tokens = page.locator("#output .token")
        assert tokens.count() == 60
        classes = tokens.evaluate_all(
            "all => all.map((each) => each.classList.contains('accepted'))"
        )
        # Steps output 0, 1, 2 and 3 accepted draft tokens, each followed by one of the target.
        assert classes[:10] == [False, True, False, True, True, False, True, True, True, False]
        colours = {
            page.locator(f"#output .{kind}").first.evaluate(
                "e => getComputedStyle(e).backgroundColor"
            )
            for kind in ("accepted", "target")
        }
        assert len(colours) == 2
        assert page.locator("#output").inner_text().startswith("The river begins")


def test_a_request_without_speculation_can_be_stopped(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.locator("#try-speculation").select_option("off")
        page.get_by_label("Max tokens").fill("300")
        page.get_by_role("button", name="Generate").click()
        page.locator("#output .token").nth(5).wait_for()
        page.get_by_role("button", name="Stop").click()
        expect_text(page.locator("#try-figures"), "no draft tokens · stopped")
        assert page.locator("#output .accepted").count() == 0
        page.wait_for_timeout(500)
    assert fleet.router.num_aborted == 1, "the request was not aborted"
    assert fleet.router.calls[0].params.speculation.enabled is False


def test_an_invalid_request_shows_its_error_and_focuses_the_input(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.get_by_label("Max tokens").fill("2000")
        page.get_by_role("button", name="Generate").click()
        expect_text(page.locator("#try-error"), "max_tokens is 2000; it must be at most 1000")
        assert page.get_by_label("Max tokens").evaluate("e => e === document.activeElement")


@SIZES
def test_a_lost_connection_is_shown_and_reestablished(fleet, visit, size):
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.context.set_offline(True)
        page.route("**/events", lambda route: route.abort())
        fleet.run(fleet.drop_streams())
        expect_text(page.locator("#link"), "Connection lost")
        pill, theme = (page.locator(name).bounding_box() for name in ("#link", "#theme"))
        assert pill["x"] + pill["width"] <= theme["x"], "a word is cut"
        assert page.locator("#link").evaluate("e => e.scrollWidth <= e.clientWidth")
        page.context.set_offline(False)
        page.unroute("**/events")
        expect_text(page.locator("#link"), "Live")


def test_the_token_is_requested_and_a_wrong_one_is_rejected(tiny_model_dir, tmp_path, visit):
    port = free_ports(1)[0]
    with running_fleet(tiny_model_dir, tmp_path, port, token=TOKEN) as fleet:
        with visit(fleet.url) as opened:
            page = opened.page
            page.get_by_label("Token", exact=True).fill("not-the-right-token")
            page.get_by_role("button", name="Continue").click()
            expect_text(page.locator("#token-error"), "rejected this token")
            page.get_by_label("Token", exact=True).fill(TOKEN)
            page.keyboard.press("Enter")
            expect_text(page.locator("#link"), "Live")
            stored = page.evaluate("() => JSON.stringify([{...localStorage}, document.cookie])")
            assert TOKEN not in stored
            set_mode(page, "Off")
            page.get_by_role("button", name="Apply").click()
            expect_text(page.locator("#control-version"), "Version 1")
        with visit(fleet.url) as opened:
            opened.page.get_by_label("Token", exact=True).wait_for()


@SIZES
def test_all_controls_are_reachable_by_keyboard_without_horizontal_scrolling(fleet, visit, size):
    set_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#mode"), "Auto")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= size["width"]
        focused = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            focused.add(
                page.evaluate("() => document.activeElement.id || document.activeElement.name")
            )
        controls = {
            "theme",
            "mode",
            "threshold",
            "rule-add",
            "reason",
            "reset",
            "decisions",
            "prompt",
        }
        assert controls <= focused
        page.locator("#theme").focus()
        outline = page.locator("#theme").evaluate("e => getComputedStyle(e).outlineStyle")
        assert outline == "solid"


def test_new_data_causes_no_layout_shift(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.evaluate(
            """() => {
              window.shift = 0;
              new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) window.shift += entry.value;
              }).observe({ type: "layout-shift", buffered: true });
            }"""
        )
        expect_text(page.locator("#link"), "Live")
        set_load(fleet)
        expect_text(tile(page, "Throughput"), r"^[1-9]")
        page.wait_for_timeout(1500)
        assert page.evaluate("() => window.shift") < 0.05


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm ci --prefix tests/browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@SIZES
def test_axe_finds_no_accessibility_violation(fleet, visit, size, scheme):
    set_load(fleet)
    with visit(fleet.url, size, color_scheme=scheme) as opened:
        page = opened.page
        expect_text(page.locator("#mode"), "Auto")
        page.get_by_role("button", name="Add a rule").click()
        page.get_by_role("button", name="Generate").click()
        page.locator("#output .accepted").first.wait_for()
        page.evaluate(AXE.read_text())
        violations = page.evaluate("() => axe.run().then((result) => result.violations)")
        assert [(v["id"], [node["html"] for node in v["nodes"]]) for v in violations] == []


def test_the_theme_button_overrides_the_system_and_is_stored(fleet, visit):
    def background(page):
        return page.evaluate("() => getComputedStyle(document.body).backgroundColor")

    with visit(fleet.url, color_scheme="dark") as opened:
        page = opened.page
        dark = background(page)
        page.get_by_role("button", name="Theme: auto").click()
        light = background(page)
        assert light != dark
        page.reload()
        assert background(page) == light
        page.get_by_role("button", name="Theme: light").click()
        assert background(page) == dark


def test_the_audit_log_loads_older_changes(fleet, visit):
    for number in range(1, 61):
        change = SpeculationChange(threshold=number, updated_by="ada", ttl_s=3600.0)
        fleet.run(fleet.plane.set_speculation(change))
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#audit li").first, r"threshold: 60, .*1 h.*version 60")
        assert page.locator("#audit li").count() == 50
        expect_text(page.locator("#control-version"), r"Version 60 · ada.* · until ")
        page.get_by_role("button", name="Older").click()
        expect_text(page.locator("#audit li").last, r"threshold: 1,.*version 1")
        assert page.locator("#audit li").count() == 60
        assert not page.get_by_role("button", name="Older").is_visible()


def test_request_overrides_can_be_disallowed(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.get_by_label("Allow requests to override").uncheck()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#control-version"), "Version 1")
    assert not fleet.run(fleet.plane.speculation()).in_force.allow_request_override


def test_a_replica_that_is_not_ready_shows_the_reason(fleet, visit):
    with visit(fleet.url) as opened:
        name = fleet.replicas[0].replica_id
        row = opened.page.locator("#replicas tr").filter(has_text=name)
        state = row.locator(".health")
        expect_text(state, "^ready$")
        fleet.replicas[0].is_draft_worker_up = False
        expect_text(state, "^draft worker down$")
        fleet.replicas[0].is_ready = False
        expect_text(state, "^the model is starting again$")
