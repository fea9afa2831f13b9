"""The cards at the top: whether the service is healthy, what drafts bring, and what was changed."""

import time

import pytest

from specdec.client import SpeculationChange
from tests.browser.conftest import SIZES
from tests.browser.pages import expect_text, legend, set_load, tile
from tests.browser.scripted_fleet import running_fleet
from tests.e2e.conftest import free_ports

NOTHING = "\u2013"
GAIN = "1.9\u00d7 the speed without drafts"


def card(page, name):
    return page.locator(f"#{name}-card")


def expect_card(page, name, kind, headline, facts=".*"):
    expect_text(page.locator(f"#{name}-card .headline"), headline)
    expect_text(page.locator(f"#{name}-facts"), facts)
    assert card(page, name).get_attribute("data-kind") == kind


def set_values(fleet, index, **values):
    for name, value in values.items():
        setattr(fleet.replicas[index], name, value)


@SIZES
def test_the_health_card_names_the_worst_cause(fleet, visit, size):
    set_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(tile(page, "Throughput"), "^[1-9]")
        expect_card(page, "health", "good", "^Healthy$", "^2 of 2 replicas ready.*0 errors.*0 rej")
        set_values(fleet, 0, num_restarts=1)
        restarts = "1 restart in 15 min"
        expect_card(page, "health", "warn", f"^Recovered: {restarts}$", f"{restarts}$")
        set_values(fleet, 0, is_draft_worker_up=False)
        expect_card(page, "health", "warn", "^Degraded: draft worker down$")
        fleet.replicas[0].failed["RESOURCE_EXHAUSTED"] += 12
        expect_card(
            page, "health", "warn", "^Overloaded: 12 rejected in 1 min$", r"12 rejected \(4"
        )
        fleet.replicas[1].failed["INVALID_ARGUMENT"] += 5
        expect_text(page.locator("#health-facts"), "5 client errors in 1 min")
        fleet.replicas[1].failed["UNAVAILABLE"] += 2
        fleet.replicas[0].failed["INTERNAL"] += 1
        expect_card(page, "health", "bad", "^Failing: 3 errors in 1 min$", "3 errors")
        set_values(fleet, 0, is_draft_worker_up=True, is_ready=False)
        reason = "the model is starting again"
        expect_card(page, "health", "warn", f"^Degraded: {reason}$", "^1 of 2 replicas ready")
        set_values(fleet, 1, is_ready=False)
        expect_card(page, "health", "bad", f"^Down: {reason}$", "^0 of 2 replicas ready")
        page.context.set_offline(True)
        page.route("**/events", lambda route: route.abort())
        fleet.run(fleet.drop_streams())
        expect_card(page, "health", "bad", r"^Unknown: no data since \d\d:\d\d:\d\d$", "^$")


def test_failures_leave_the_card_after_a_minute(fleet, visit):
    with visit(fleet.url) as opened:
        expect_text(opened.page.locator("#health"), "^Healthy$")
        fleet.replicas[0].failed["INTERNAL"] += 1
        expect_text(opened.page.locator("#health"), "^Failing: 1 error in")
        expect_text(opened.page.locator("#health"), "^Healthy$", timeout_s=75)


@SIZES
def test_the_mode_stays_while_the_policy_changes_its_decisions(fleet, visit, size):
    set_load(fleet, drafted_share=0.75)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_card(page, "speculation", "good", f"^Auto: {GAIN}$", "drafts in 7[4-6] % of steps")
        seen = set()
        for _ in range(24):
            time.sleep(0.25)
            seen.add((page.locator("#mode").inner_text(), page.locator("#gain").inner_text()))
            assert card(page, "speculation").get_attribute("data-kind") == "good"
        assert seen == {("Auto", GAIN)}
        changes = [len(replica.changes) for replica in fleet.replicas]
        assert min(changes) > 24, "the decisions did change"


@pytest.mark.parametrize(
    ("speedup", "kind", "gain"),
    [(1.9, "good", "1.9"), (1.02, "", "1.02"), (0.98, "", "0.98"), (0.9, "warn", "0.9")],
)
def test_the_gain_has_a_colour_if_drafts_pay_or_cost(fleet, visit, speedup, kind, gain):
    set_load(fleet, speedup=speedup)
    with visit(fleet.url) as opened:
        expect_card(opened.page, "speculation", kind, f"^Auto: {gain}. the speed without drafts$")


def test_without_load_there_is_no_draft_length(fleet, visit):
    set_load(fleet)
    with visit(fleet.url) as opened:
        page = opened.page
        expect_text(page.locator("#replicas tr").first, "5highest expected throughput")
        expect_text(page.locator("#gain"), GAIN)
        set_load(fleet, 0, 0)
        expect_card(page, "speculation", "", "^Auto: idle$", "^no steps$")
        expect_text(page.locator("#replicas tr").first, f"0{NOTHING}{NOTHING}0$")
        assert legend(page, "Tokens per draft") == [NOTHING, NOTHING]
        assert legend(page, "Drafts") == [NOTHING, NOTHING]
        assert legend(page, "Speed-up") == [NOTHING]
        assert "k =" not in page.locator(".summary").inner_text()


def test_no_drafts_have_a_reason_and_no_warning(fleet, visit):
    set_load(fleet, drafted_share=0.0)
    with visit(fleet.url) as opened:
        page = opened.page
        pays = "^drafts do not pay at this load$"
        expect_card(page, "speculation", "", "^Auto: no drafts$", pays)
        set_load(fleet, num_decoding=40)
        reason = "^threshold on decoding requests$"
        expect_card(page, "speculation", "", "^Auto: no drafts$", reason)


def test_a_service_without_a_drafter_has_no_mode(tiny_model_dir, tmp_path, visit):
    port = free_ports(1)[0]
    with running_fleet(tiny_model_dir, tmp_path, port, configured=None) as fleet:
        set_load(fleet)
        with visit(fleet.url) as opened:
            drafts = "^this service has no drafter$"
            expect_card(opened.page, "speculation", "", "^None: no drafts$", drafts)


def test_the_last_change_has_author_values_reason_and_where_it_applies(fleet, visit):
    with visit(fleet.url) as opened:
        page = opened.page
        expect_card(page, "change", "", "^None$", "^as configured$")
        fleet.replicas[1].is_stuck = True
        change = SpeculationChange(
            mode="off", threshold=8, updated_by="grace", reason="incident 12", ttl_s=3600.0
        )
        fleet.run(fleet.plane.set_speculation(change))
        where = "in force on 1 of 2 replicas"
        facts = rf"^grace, \d\d:\d\d:\d\d.*incident 12.*{where}.*until "
        expect_card(page, "change", "warn", "^mode: off, threshold: 8, expires after: 1 h$", facts)
        assert page.locator("#mode").inner_text() == "Off"
        fleet.replicas[1].is_stuck = False
        expect_card(page, "change", "", "^mode: off", r"incident 12until \d")


@SIZES
def test_the_summary_is_on_the_first_screen(fleet, visit, size):
    set_load(fleet)
    with visit(fleet.url, size) as opened:
        page = opened.page
        expect_text(page.locator("#gain"), GAIN)
        boxes = [card(page, name).bounding_box() for name in ("health", "speculation", "change")]
        assert all(box["y"] + box["height"] < size["height"] / 2 + 10 for box in boxes)
        tiles = page.locator(".tile").last.bounding_box()
        assert tiles["y"] + tiles["height"] <= size["height"]


def test_decisions_of_the_policy_are_one_row(fleet, visit):
    set_load(fleet, drafted_share=0.75)
    with visit(fleet.url) as opened:
        page = opened.page
        rows = page.locator("#decisions li")
        expect_text(rows.first, r"on replica-\d.*6 decoding.*\d\d changes since .*k = 0 to 5")
        assert rows.count() == 2, "one for each replica"
        shown = {text.split(" on ")[1].split("highest")[0] for text in rows.all_inner_texts()}
        assert len(shown) == 2
        for mode in ("off", "on"):
            fleet.run(fleet.plane.set_speculation(SpeculationChange(mode=mode)))
            time.sleep(1.0)
        expect_text(rows.nth(0), "k = 5.*operator")
        texts = rows.all_inner_texts()
        assert [("operator" in text) for text in texts] == [True] * 4 + [False] * 2
