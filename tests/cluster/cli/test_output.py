"""The progress bar and generated texts, with and without a terminal."""

import io
import json
import sys

import pytest

from cluster.cli.output import counted, progress_bar, show_json, show_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_that_is_removed_at_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(3, "request", "at most 2 at once") as advance:
        advance()
        assert "at most 2 at once:   0%" in terminal.getvalue()
        assert "0/3" in terminal.getvalue()
        assert "? requests/s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


@pytest.mark.parametrize(
    ("total", "shown"),
    [
        (3, "1/3 [00:04<00:08,  0.25 requests/s]"),
        (None, "load: 1 requests [00:04,  0.25 requests/s]"),
    ],
)
def test_a_slow_rate_is_per_second_too(monkeypatch, total, shown):
    clock, terminal = [0.0], Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with progress_bar(total, "request", "load") as advance:
        clock[0] = 4.0
        advance()
    assert shown in terminal.getvalue()


def test_without_a_terminal_nothing_is_drawn(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress_bar(3, "request") as advance:
        advance()
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_a_number_has_its_noun_in_the_singular_or_plural(count, text):
    assert counted(count, "token") == text


HOSTILE = "a\tb\n\x1b]52;c;ZXZpbA==\x07\r\x9b2J\x7fé"


def test_generated_text_cannot_control_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    show_text(HOSTILE, nl=False)
    assert terminal.getvalue() == "a\tb\n\\x1b]52;c;ZXZpbA==\\x07\\r\\x9b2J\\x7fé"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    show_text(HOSTILE)
    assert pipe.getvalue() == HOSTILE + "\n"


def test_json_has_no_control_characters(capsys):
    """Also above ASCII, where JSON allows them; the values are the same."""
    show_json({"text": HOSTILE})
    line = capsys.readouterr().out
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line) == {"text": HOSTILE}
