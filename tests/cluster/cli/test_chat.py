"""`specdec chat` against a service in this process."""

import os
import signal
import sys
import threading
import time

import grpc
import pytest
from click.testing import CliRunner

from cluster.cli.chat import Conversation, run_chat, typed_lines
from cluster.cli.main import main
from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams


@pytest.fixture
def chat(service):
    def run(lines, *flags):
        return CliRunner().invoke(main, ["chat", "--address", service.address, *flags], input=lines)

    return run


def turns(request):
    return [(turn.role, turn.content) for turn in request.chat.messages]


def test_each_line_is_sent_with_the_history(chat, service):
    result = chat("Why?\n\nAnd then?\n")
    assert (result.exit_code, result.stdout) == (0, "Blue sky\nBlue sky\n")
    assert [line[:9] for line in result.stderr.splitlines()] == ["3 tokens,"] * 2
    assert "acceptance rate 50%, acceptance length 2.50" in result.stderr
    first, second = service.requests
    assert turns(first) == [("user", "Why?")]
    assert turns(second) == [("user", "Why?"), ("assistant", "Blue sky"), ("user", "And then?")]


def test_the_system_message_comes_first_and_a_reset_keeps_it(chat, service):
    chat("one\n/system Be kind.\ntwo\n/reset\nthree\n/system\nfour\n", "--system", "Be brief.")
    first_messages = [turns(request)[0] for request in service.requests]
    assert first_messages == [
        ("system", "Be brief."),
        ("system", "Be kind."),
        ("system", "Be kind."),
        ("user", "three"),
    ]
    assert [len(turns(request)) for request in service.requests] == [2, 4, 2, 3]


def test_every_message_goes_to_the_model(chat, service):
    chat("one\ntwo\n", "--model", "sql")
    assert [request.model for request in service.requests] == ["sql", "sql"]


def test_statistics_cover_all_completions(chat):
    result = chat("one\n/stats\n/reset\ntwo\n/stats\n")
    stats = [line for line in result.stderr.splitlines() if "completion" in line]
    expected = ["1 completion, 3 tokens", "2 completions, 6 tokens"]
    assert [", ".join(line.split(", ")[:2]) for line in stats] == expected
    assert stats[1].endswith("acceptance rate 50%, acceptance length 2.50")
    assert "0 completions, 0 tokens, 0.0 tokens/s" in chat("/stats\n").stderr


def test_exit_and_an_unknown_command(chat, service):
    result = chat("/exeunt\n/exit\nWhy?\n")
    assert result.exit_code == 0
    assert "unknown command /exeunt" in result.stderr
    assert "/system TEXT" in result.stderr
    assert service.requests == []


def test_the_flags_are_those_of_generate(chat, service):
    flags = "--temperature 0.5 --seed 7 --max-tokens 9 --no-speculation --min-p 0.5 --regex a+"
    chat("Why?\n", *flags.split())
    [request] = service.requests
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)
    assert (request.sampling.min_p, request.sampling.structured_output.regex) == (0.5, "a+")
    assert request.speculation.enabled is False


def test_an_error_ends_a_script(chat, service):
    service.error = (grpc.StatusCode.INVALID_ARGUMENT, "prompt length is 99; it must be less")
    result = chat("Why?\nAnd then?\n")
    assert result.exit_code == 1
    assert result.stderr == "error: prompt length is 99; it must be less\n"
    assert len(service.requests) == 1


def test_an_error_does_not_end_a_chat_nor_enter_the_history(service, capsys):
    def fail_once():
        service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield "one"
        service.error = None
        yield "two"

    with Client(service.address) as client:
        conversation = Conversation(client, SamplingParams())
        run_chat(conversation, fail_once(), continue_on_error=True)
    assert "error: the queue is full" in capsys.readouterr().err
    assert turns(service.requests[1]) == [("user", "two")]


def test_a_message_that_cannot_be_sent_does_not_end_a_chat(service, capsys):
    """As bytes of another encoding that are pasted into a terminal."""
    with Client(service.address) as client:
        conversation = Conversation(client, SamplingParams())
        run_chat(conversation, iter(["caf\udce9", "Why?"]), continue_on_error=True)
    assert "it must be valid Unicode" in capsys.readouterr().err
    assert [turns(request) for request in service.requests] == [[("user", "Why?")]]


def interrupt_once_it_hangs(service):
    assert service.is_hanging.wait(30)
    while "Blue" not in sys.stdout.getvalue():  # pytest's
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def ctrl_c():
    """Install Python's default handler of Ctrl-C, which background processes do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_completion_but_not_the_chat(service, capsys):
    service.hangs, service.num_chunks_before_error = True, 1
    with Client(service.address) as client:
        conversation = Conversation(client, SamplingParams())
        threading.Thread(target=interrupt_once_it_hangs, args=(service,)).start()
        conversation.send("one")
        assert service.ended.wait(30), "the call was not cancelled"
        service.hangs = False
        conversation.send("two")
    assert turns(service.requests[1]) == [
        ("user", "one"),
        ("assistant", "Blue"),
        ("user", "two"),
    ]
    output = capsys.readouterr()
    assert output.out == "Blue\nBlue sky\n"
    assert output.err.startswith("stopped\n")


def test_at_the_prompt_ctrl_c_discards_a_line_and_ctrl_d_quits(capsys):
    typed = iter(["one", KeyboardInterrupt(), "two", EOFError(), "three"])

    def read(prompt):
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    assert list(typed_lines(read)) == ["one", "two"]
    assert "Ctrl-D or /exit quits" in capsys.readouterr().err
