"""The HTML of outputs in a real browser, on the backgrounds of light and dark notebooks."""

import re

import pytest

from specdec.types.reports.stats import SpeculationStats
from specdec.types.token_display import ShownChoice, ShownOutput, outputs_html
from tests.browser.conftest import NARROW, WIDE

PIECES = [
    "The",
    " river\n",
    "<img src=x onerror='window.attacked = true'>",
    "</mark></div><script>window.attacked = true</script>",
    " $x$",
    " \u0639\u0631\u0628\u064a",
    " a" * 60,
    "b" * 500,
]
IS_DRAFTED = [index % 2 == 1 for index in range(len(PIECES))]
THEMES = {"light": ("rgb(255, 255, 255)", "rgb(34, 34, 34)"),
          "dark": ("rgb(17, 17, 17)", "rgb(224, 224, 224)")}  # fmt: skip
"""Background and text of JupyterLab's themes, about."""


def luminance(color):
    """Return the relative luminance of WCAG 2."""
    scaled = [each / 255 for each in color]
    red, green, blue = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in scaled]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def channels(css):
    """Return red, green and blue, and the opacity, of a computed colour."""
    values = [float(each) for each in re.findall(r"[\d.]+", css)]
    return values[:3], values[3] if len(values) > 3 else 1.0


@pytest.fixture(params=THEMES)
def page(browser, request):
    background, text = THEMES[request.param]
    choice = ShownChoice("".join(PIECES), IS_DRAFTED, list(map(len, PIECES)), "stop")
    shown = outputs_html([ShownOutput(PIECES[2], [choice], SpeculationStats(3, 9, 4))])
    page = browser.new_context(viewport=WIDE).new_page()
    theme = f"background: {background}; color: {text}; font: 14px sans-serif"
    page.set_content(f"<body style='{theme}'>{shown}</body>")
    yield page
    page.context.close()


def style(page, selector, name):
    script = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    return page.evaluate(script, [selector, name])


def test_the_page_has_the_text_alone(page):
    assert page.locator(".text").evaluate("each => each.textContent") == "".join(PIECES)
    assert page.locator(".text mark").count() == sum(IS_DRAFTED)
    assert page.locator("script, img").count() == 0
    assert page.evaluate("window.attacked") is None


def test_marked_tokens_are_legible_and_differ_by_more_than_colour(page):
    background, _ = channels(style(page, "body", "backgroundColor"))
    text, _ = channels(style(page, ".text mark", "color"))
    assert text == channels(style(page, "body", "color"))[0], "that of the notebook"
    marked, alpha = channels(style(page, ".text mark", "backgroundColor"))
    assert 0 < alpha < 1
    blended = [
        alpha * one + (1 - alpha) * other for one, other in zip(marked, background, strict=True)
    ]
    assert contrast(text, blended) >= 7
    underline, _ = channels(style(page, ".text mark", "borderBottomColor"))
    assert style(page, ".text mark", "borderBottomWidth") == "2px"
    assert contrast(underline, background) >= 3


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_long_words_are_wrapped(page, size):
    page.set_viewport_size(size)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
