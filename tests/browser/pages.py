"""Locators and actions that the tests of the dashboard share."""

import re


def tile(page, title):
    return page.locator(".tile", has_text=title).locator(".value")


def expect_text(locator, pattern, timeout_s=60):
    from playwright.sync_api import expect

    expect(locator).to_have_text(re.compile(pattern, re.DOTALL), timeout=1000 * timeout_s)


def set_mode(page, mode):
    page.get_by_role("radio", name=mode, exact=True).check(force=True)


def set_load(fleet, requests_per_s=6.0, num_decoding=6, **values):
    for replica in fleet.replicas:
        replica.requests_per_s, replica.num_decoding = requests_per_s, num_decoding
        for name, value in values.items():
            setattr(replica, name, value)


def chart(page, title):
    return page.locator(".chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def legend(page, title):
    """Return the values below a chart."""
    return chart(page, title).locator(".key b").all_inner_texts()
