"""Lines of a start that takes long."""

import threading
import time

import pytest

from cluster.serve.reminder import Reminder


def test_silence_is_filled_until_the_start_has_ended():
    lines, reminded = [], threading.Event()

    def remind(line):
        lines.append(line)
        assert line.startswith("  still starting, ")
        reminded.set()

    with Reminder(lines.append, remind, interval_s=0.02) as reminder:
        reminder.report("loading")
        assert reminded.wait(30)
        reminder.stop()
        num_lines = len(lines)
        time.sleep(0.1)
        reminder.report("ready")
    assert lines[0] == "loading"
    assert lines[num_lines:] == ["ready"]


def test_it_is_silent_while_there_are_reports():
    lines = []
    with Reminder(lines.append, lines.append, interval_s=60) as reminder:
        for _ in range(3):
            reminder.report("stage")
    assert lines == ["stage"] * 3


def test_a_failed_start_ends_it():
    with pytest.raises(OSError, match="full"), Reminder(print, print) as reminder:
        raise OSError("full")
    reminder._thread.join(5)
    assert not reminder._thread.is_alive()
