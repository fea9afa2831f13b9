"""Charts as SVG files."""

from xml.etree import ElementTree

from cluster.cli.bench.charts import BarChart, LineChart, draw_charts

SVG = "{http://www.w3.org/2000/svg}"
LINES = LineChart("t", "x", [1, 2, 4], {"a": [1.0, float("nan"), 3.0], "b": [1.0, 2.0, 2.5]})
BARS = BarChart("u", {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 3.0}})


def texts(svg):
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_lines_have_title_units_and_legend():
    assert {"t", "x", "1", "2", "4", "a", "b"} <= set(texts(draw_charts([LINES])))


def test_nan_is_skipped():
    groups = ElementTree.fromstring(draw_charts([LINES])).iter(f"{SVG}g")
    points = {each.get("id"): len(list(each.iter(f"{SVG}use"))) for each in groups}
    assert (points["t: a"], points["t: b"]) == (2, 3)


def test_charts_stand_below_each_other_and_axes_begin_at_zero():
    found = texts(draw_charts([LINES, BARS]))
    assert found.index("t") < found.index("u")
    assert found.count("0.0") + found.count("0") == 2


def test_an_axis_begins_below_the_least_value_if_that_is_negative():
    found = texts(draw_charts([LineChart("t", "x", [1, 2], {"a": [-1.0, 3.0]})]))
    assert "\N{MINUS SIGN}1.0" in found
    assert "0.0" in found


def test_a_value_stands_on_the_only_bar_of_a_group():
    found = texts(draw_charts([BarChart("u", {"one": {"a": 1.25}, "two": {"a": 3.0}})]))
    assert {"1.2", "3.0", "one", "two"} <= set(found)


def test_the_same_charts_make_the_same_file():
    assert draw_charts([LINES, BARS]) == draw_charts([LINES, BARS])


def test_no_chart_is_an_empty_picture():
    assert ElementTree.fromstring(draw_charts([])).tag == f"{SVG}svg"
