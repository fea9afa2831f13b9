"""The dashboard in a real Chromium, over the real control plane and replicas that are played."""

import re

import pytest

from specdec.client import SpeculationChange
from tests.browser.conftest import AXE, NARROW, WIDE
from tests.browser.pages import expect_text, set_mode, tile
from tests.browser.scripted_fleet import running_fleet
from tests.e2e.conftest import free_ports

TOKEN = "a-token-of-the-operators"
SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])


@pytest.fixture
def fleet(tiny_model_dir, tmp_path):
    with running_fleet(tiny_model_dir, tmp_path, free_ports(1)[0]) as running:
        yield running


def under_load(fleet, requests_per_s=6.0, num_decoding=6):
    for replica in fleet.replicas:
        replica.requests_per_s, replica.num_decoding = requests_per_s, num_decoding


@SIZES
def test_turning_it_off_is_seen_everywhere(fleet, visit, size):
    under_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        expect_text(page.locator("#steer-state"), "On, k = 5")
        set_mode(page, "Off")
        expect_text(page.locator("#preview"), r"this means no drafts")
        page.get_by_label("Your name").fill("ada")
        page.get_by_label("Reason").fill("load test")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-state"), r"^Off.*operator")
        expect_text(tile(page, "Draft tokens"), r"^0 ")
        expect_text(page.locator("#audit li").first, r"mode.*off.*version 1, ada: load test")
        expect_text(page.locator("#decisions li").first, "no drafts")
        expect_text(page.locator("#steer-version"), "Version 1 · ada")
    state = fleet.run(fleet.plane.speculation())
    assert (state.in_force.mode, state.updated_by, state.reason) == ("off", "ada", "load test")


@SIZES
def test_charts_move_under_load(fleet, visit, size):
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Throughput"), r"^0 ")
        before = ink(page)
        under_load(fleet)
        expect_text(tile(page, "Throughput"), r"^[1-9][\d.]*k? tokens/s")
        expect_text(tile(page, "Requests"), r"^[1-9]")
        expect_text(tile(page, "First token"), r"^\d+ ms")
        expect_text(tile(page, "Acceptance"), r"^\d\d %")
        expect_text(page.locator(".chart", has_text="Estimated speed-up").locator("b"), r"\d\S")
        page.wait_for_timeout(2500)
        after = ink(page)
        assert len(after) == 9
        assert all(one != other for one, other in zip(before, after, strict=True))
        assert page.locator(".bars .bar").count() == 5
        heights = page.locator(".bars .bar").evaluate_all(
            "bars => bars.map((bar) => bar.getBoundingClientRect().height)"
        )
        assert heights == sorted(heights, reverse=True)
        assert heights[-1] > 10


def ink(page):
    """What each chart has drawn."""
    return page.locator(".chart canvas").evaluate_all("all => all.map((each) => each.toDataURL())")


@SIZES
def test_rules_are_previewed_applied_and_taken_back(fleet, visit, size):
    under_load(fleet, requests_per_s=10.0)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Requests"), r"^(1[5-9]|2\d)")
        page.get_by_role("button", name="Add a rule").click()
        page.get_by_label("from (/s)").fill("5")
        page.get_by_label("mode", exact=True).select_option("on")
        page.get_by_label("tokens", exact=True).fill("3")
        expect_text(page.locator("#preview"), r"\d requests/s.* means k = 3\. Rule 1 holds")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-state"), r"^On, k = 3.*rule on requests per second")
        expect_text(page.locator("#preview"), r"Rule 1 holds")
        # The mode that was set stays as it was: the rule is upon it.
        assert page.get_by_role("radio", name="Auto", exact=True).is_checked()
        page.get_by_role("button", name=re.compile("Remove the rule from 5")).click()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-state"), r"^On, k = 5")
    assert fleet.run(fleet.plane.speculation()).rules == ()


def test_a_wrong_value_is_marked_where_it_is(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.get_by_label("Threshold").fill("9999")
        expect_text(page.locator("#steer-error"), "threshold is 9999; it must be .* 0 to 4096")
        assert page.get_by_label("Threshold").get_attribute("aria-invalid") == "true"
        page.get_by_role("button", name="Discard").click()
        expect_text(page.locator("#steer-error"), "^$")
        assert page.get_by_label("Threshold").input_value() == "32"


def test_who_was_faster_is_named_and_nothing_is_lost(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.get_by_label("Threshold").fill("8")
        change = SpeculationChange(mode="off", updated_by="grace", reason="incident 12")
        fleet.run(fleet.plane.set_speculation(change))
        told = "grace changed this at .*incident 12.*mode is off"
        expect_text(page.locator("#conflict-text"), told)
        page.get_by_role("button", name="Keep mine, over theirs").click()
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
        assert page.get_by_label("Threshold").input_value() == "8"
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-version"), "Version 2")
    state = fleet.run(fleet.plane.speculation())
    assert (state.in_force.mode, state.in_force.threshold) == ("off", 8)


def test_what_is_edited_while_a_change_is_on_its_way_stays(fleet, visit):
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
        expect_text(page.locator("#steer-version"), "Version 1")
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-version"), "Version 2")
    assert fleet.run(fleet.plane.speculation()).in_force.mode == "off"


def test_a_change_by_another_between_two_looks_is_a_conflict(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.context.route("**/dashboard/events", lambda route: route.abort())
        set_mode(page, "On")

        def be_faster(route):
            if route.request.method == "PUT":
                change = SpeculationChange(mode="off", updated_by="bob")
                fleet.run(fleet.plane.set_speculation(change))
            route.continue_()

        page.route("**/v1/admin/speculation", be_faster)
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#conflict-text"), "bob changed this")
        page.get_by_role("button", name="Take theirs").click()
        assert page.get_by_role("radio", name="Off", exact=True).is_checked()
    assert fleet.run(fleet.plane.speculation()).in_force.mode == "off"


@SIZES
def test_an_answer_shows_whose_each_token_is(fleet, visit, size):
    with visit(fleet.url, size) as opened:
        page = opened.page
        page.get_by_label("Most tokens").fill("60")
        page.get_by_role("button", name="Generate").click()
        told = r"60 tokens .* tokens/s .* acceptance rate .*reached the most"
        expect_text(page.locator("#try-figures"), told)
        tokens = page.locator("#answer .token")
        assert tokens.count() == 60
        classes = tokens.evaluate_all(
            "all => all.map((each) => each.classList.contains('accepted'))"
        )
        # Steps bring 0, 1, 2 and 3 accepted tokens, and one of the target's own each.
        assert classes[:10] == [False, True, False, True, True, False, True, True, True, False]
        colours = {
            page.locator(f"#answer .{kind}").first.evaluate(
                "e => getComputedStyle(e).backgroundColor"
            )
            for kind in ("accepted", "own")
        }
        assert len(colours) == 2
        assert page.locator("#answer").inner_text().startswith("The river begins")


def test_speculation_off_for_a_request_and_stopping_it(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.locator("#try-speculation").select_option("off")
        page.get_by_label("Most tokens").fill("300")
        page.get_by_role("button", name="Generate").click()
        page.locator("#answer .token").nth(5).wait_for()
        page.get_by_role("button", name="Stop").click()
        expect_text(page.locator("#try-figures"), "nothing drafted · stopped")
        assert page.locator("#answer .accepted").count() == 0
        page.wait_for_timeout(500)
    assert fleet.router.num_left == 1, "the request went on without a reader"
    assert fleet.router.calls[0].params.speculation.enabled is False


def test_what_a_request_must_not_ask_is_said_beside_it(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.get_by_label("Most tokens").fill("2000")
        page.get_by_role("button", name="Generate").click()
        expect_text(page.locator("#try-error"), "max_tokens is 2000; it must be at most 1000")
        assert page.get_by_label("Most tokens").evaluate("e => e === document.activeElement")


def test_a_lost_connection_is_told_and_comes_back(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.context.set_offline(True)
        page.route("**/events", lambda route: route.abort())
        fleet.run(drop_streams(fleet))
        expect_text(page.locator("#link"), "Connection lost")
        page.context.set_offline(False)
        page.unroute("**/events")
        expect_text(page.locator("#link"), "Live")


async def drop_streams(fleet):
    for connection in list(fleet.server.server_state.connections):
        connection.transport.abort()


def test_a_token_is_asked_for_and_a_wrong_one_is_called_wrong(tiny_model_dir, tmp_path, visit):
    port = free_ports(1)[0]
    with running_fleet(tiny_model_dir, tmp_path, port, token=TOKEN) as fleet:
        with visit(fleet.url) as opened:
            page = opened.page
            page.get_by_label("Token", exact=True).fill("not-the-right-token")
            page.get_by_role("button", name="Go on").click()
            expect_text(page.locator("#token-error"), "not the right one")
            page.get_by_label("Token", exact=True).fill(TOKEN)
            page.keyboard.press("Enter")
            expect_text(page.locator("#link"), "Live")
            stored = page.evaluate("() => JSON.stringify([{...localStorage}, document.cookie])")
            assert TOKEN not in stored
            set_mode(page, "Off")
            page.get_by_role("button", name="Apply").click()
            expect_text(page.locator("#steer-version"), "Version 1")
        with visit(fleet.url) as opened:
            opened.page.get_by_label("Token", exact=True).wait_for()


@SIZES
def test_everything_is_reached_by_keyboard_and_fits(fleet, visit, size):
    under_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#steer-state"), "On")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= size["width"]
        seen = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            seen.add(
                page.evaluate("() => document.activeElement.id || document.activeElement.name")
            )
        wanted = {
            "theme",
            "mode",
            "threshold",
            "rule-add",
            "reason",
            "reset",
            "decisions",
            "prompt",
        }
        assert wanted <= seen
        page.locator("#theme").focus()
        ring = page.locator("#theme").evaluate("e => getComputedStyle(e).outlineStyle")
        assert ring == "solid"


def test_nothing_moves_when_figures_come(fleet, visit):
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
        under_load(fleet)
        expect_text(tile(page, "Throughput"), r"^[1-9]")
        page.wait_for_timeout(1500)
        assert page.evaluate("() => window.shift") < 0.05


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm ci --prefix tests/browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@SIZES
def test_axe_finds_nothing(fleet, visit, size, scheme):
    under_load(fleet)
    with visit(fleet.url, size, color_scheme=scheme) as opened:
        page = opened.page
        expect_text(page.locator("#steer-state"), "On")
        page.get_by_role("button", name="Add a rule").click()
        page.get_by_role("button", name="Generate").click()
        page.locator("#answer .accepted").first.wait_for()
        page.evaluate(AXE.read_text())
        found = page.evaluate("() => axe.run().then((result) => result.violations)")
        told = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
        assert told == []


def test_the_switch_overrules_the_system_and_is_remembered(fleet, visit):
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


def test_older_changes_are_a_button_away(fleet, visit):
    for number in range(1, 61):
        change = SpeculationChange(threshold=number, updated_by="ada", ttl_s=3600.0)
        fleet.run(fleet.plane.set_speculation(change))
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#audit li").first, r"threshold: 60, .*1 h.*version 60")
        assert page.locator("#audit li").count() == 50
        expect_text(page.locator("#steer-version"), r"Version 60 · ada.* · until ")
        page.get_by_role("button", name="Older").click()
        expect_text(page.locator("#audit li").last, r"threshold: 1,.*version 1")
        assert page.locator("#audit li").count() == 60
        assert not page.get_by_role("button", name="Older").is_visible()


def test_whether_requests_may_choose_is_set_too(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        page.get_by_label("Requests may choose for themselves").uncheck()
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#steer-version"), "Version 1")
    assert not fleet.run(fleet.plane.speculation()).in_force.allow_request_override


def test_a_replica_tells_what_it_lacks(fleet, visit):
    with visit(fleet.url) as opened:
        name = fleet.replicas[0].replica_id
        row = opened.page.locator("#replicas tr").filter(has_text=name)
        state = row.locator(".health")
        expect_text(state, "^ready$")
        fleet.replicas[0].is_draft_worker_up = False
        expect_text(state, "^draft worker away$")
        fleet.replicas[0].is_ready = False
        expect_text(state, "^the model is starting again$")
