"""Output of pip with a line whenever it is silent."""

import io
import threading
from contextlib import redirect_stdout

from tools.install import progress


def test_lines_pass_and_silence_is_reported():
    def lines():
        yield "a\n"
        yield "\n"
        ended.wait(30)
        yield "b\n"

    ended, received = threading.Event(), []
    for line in progress.with_reminders(lines(), 0.02):
        received.append(line)
        if len(received) == 3:
            ended.set()
    assert received[:3] == ["a", None, None]
    assert received[-1] == "b"


def test_the_exit_code_is_that_of_pip(tmp_path):
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert progress.main([str(tmp_path), "no-such-command"]) != 0
    assert "no-such-command" in shown.getvalue()


def test_the_size_is_that_of_all_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 1000)
    (tmp_path / "c").write_bytes(b"x" * 500)
    (tmp_path / "gone").symlink_to("nothing")
    assert progress.size_of(str(tmp_path)) == 1500 + len("nothing")
