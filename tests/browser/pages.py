"""Locators and actions that the tests of the dashboard share."""

import re


def tile(page, title):
    return page.locator(".tile", has_text=title).locator(".value")


def expect_text(locator, pattern):
    from playwright.sync_api import expect

    expect(locator).to_have_text(re.compile(pattern), timeout=15_000)


def set_mode(page, mode):
    page.get_by_role("radio", name=mode, exact=True).check(force=True)
