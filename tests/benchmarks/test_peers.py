"""Peers: messages of the drivers, missing peers, and comparisons."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from benchmarks.machine import describe_machine
from benchmarks.peers import __main__ as command
from benchmarks.peers.catalog import PEERS, Launch, Peer, Setup
from benchmarks.peers.comparisons import comparisons, lookup_case, lookup_ratios, plain_case
from benchmarks.peers.driver_loop import (
    decode_measurement,
    decode_workload,
    encode_measurement,
    encode_workload,
)
from benchmarks.peers.environments import PeerUnavailableError, Recipe, environment_python
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.report import (
    Agreement,
    PeersReport,
    PeerStatus,
    agreement,
    chart,
    markdown,
    num_common,
)
from benchmarks.peers.transformers_driver import padded_left
from benchmarks.summary import compare_all, summarize
from benchmarks.workloads import Measurement, StreamRecord, Workload

# The test's driver is not part of the package, so it is found through the working directory.
ECHO = """
import sys
from benchmarks.peers.driver_loop import serve
from benchmarks.workloads import Measurement, StreamRecord

class Echo:
    def __init__(self, settings):
        print("noise that is not an answer")
        self.offset = settings["offset"]
    def measure(self, workload):
        print("more noise")
        if workload.max_tokens == 0:
            raise SystemExit("it broke")
        tokens = tuple(token + self.offset for token in workload.prompts[0])
        return Measurement(2.0, (StreamRecord(tokens, (0.5,)),))

serve(Echo, ("pytest",))
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_driver.py").write_text(ECHO)
    from benchmarks.peers import process

    (tmp_path / "benchmarks").symlink_to(process._ROOT / "benchmarks")
    monkeypatch.setattr(process, "_ROOT", tmp_path)
    return Launch(sys.executable, "echo_driver", {"offset": 10})


def test_messages_round_trip_through_json():
    workload = Workload(((1, 2), (3,)), 8, "ngram")
    assert decode_workload(json.loads(json.dumps(encode_workload(workload)))) == workload
    measurement = Measurement(1.5, (StreamRecord((1, 2), (0.5, 1.0)),), None)
    decoded = json.loads(json.dumps(encode_measurement(measurement)))
    assert decode_measurement(decoded) == measurement


def test_a_peer_may_print_other_output(echo, tmp_path):
    with PeerProcess(echo, tmp_path / "log") as peer:
        assert peer.loaded.versions.keys() == {"pytest"}
        measured = peer.measure(Workload(((1, 2),), 2))
    assert measured.streams == (StreamRecord((11, 12), (0.5,)),)
    assert "noise that is not an answer" in (tmp_path / "log").read_text()


def test_a_peer_that_ends_reports_the_reason(echo, tmp_path):
    with (
        pytest.raises(PeerUnavailableError, match="it broke"),
        PeerProcess(echo, tmp_path / "log") as peer,
    ):
        peer.measure(Workload(((1, 2),), 0))


def test_a_peer_that_does_not_load_reports_the_reason(tmp_path):
    launch = Launch(sys.executable, "benchmarks.peers.no_such_driver", {})
    with pytest.raises(PeerUnavailableError, match="no_such_driver"):
        PeerProcess(launch, tmp_path / "log").__enter__()


def test_a_missing_peer_is_reported_and_the_others_continue(echo, tmp_path):
    def fail(setup):
        raise PeerUnavailableError("no compiler")

    peers = [
        Peer("broken", "fp32", ("none",), 1, fail),
        Peer("ends", "fp32", ("none",), 1, lambda setup: replace(echo, settings={"offset": None})),
        Peer("echo", "fp32", ("none",), 1, lambda setup: echo),
    ]
    with ExitStack() as stack:
        contenders, statuses = command.enter_peers(stack, peers, Setup(tmp_path, tmp_path, "m"))
        assert list(contenders) == ["echo"]
    assert [each.name for each in statuses] == ["broken", "ends", "echo"]
    assert statuses[0].missing == "no compiler"
    assert "TypeError" in statuses[1].missing
    assert not statuses[2].missing


def test_an_environment_is_built_once_for_each_recipe(tmp_path, monkeypatch):
    from benchmarks.peers import environments

    commands = []
    monkeypatch.setattr(environments, "_run", lambda command, *rest: commands.append(command))
    recipe = Recipe("some", ("a==1",), removed=("b",))
    python = environment_python(tmp_path, recipe)
    assert python == tmp_path / "some" / "bin" / "python"
    assert [command[-2:] for command in commands[1:]] == [["install", "a==1"], ["--yes", "b"]]
    commands.clear()
    environment_python(tmp_path, recipe)
    assert commands == []
    environment_python(tmp_path, Recipe("some", ("a==2",)))
    assert commands[-1][-1] == "a==2"


def test_a_failed_build_reports_the_end_of_its_log(tmp_path):
    from benchmarks.peers import environments

    with pytest.raises(PeerUnavailableError, match="no such thing"):
        environments._run(
            [sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log"
        )


def test_peer_names_are_unique():
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_prompts_are_padded_on_the_left():
    assert padded_left([(1, 2, 3), (4,)], 0) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])


def measured_in(seconds, tokens=(1, 2, 3)):
    return [Measurement(each, (StreamRecord(tokens, (0.1,)),), None) for each in seconds]


def example():
    return {
        plain_case("transformers", "edit"): measured_in([4.0, 8.0]),
        lookup_case("transformers", "edit", "ngram"): measured_in([3.0, 6.0]),
        plain_case("ours fp32", "edit"): measured_in([2.0, 4.0]),
        lookup_case("ours fp32", "edit", "ngram"): measured_in([2.0, 3.0], (1, 2, 9)),
        lookup_case("ours fp32", "edit", "suffix"): measured_in([1.0, 2.0]),
    }


def test_ours_are_compared_with_each_peer_that_was_measured():
    [ratio] = compare_all(comparisons(["edit"]), example())
    assert ratio.name == "ours fp32 / transformers, 1 stream"
    assert (ratio.median, ratio.aim, ratio.is_met) == (2.0, 1.6, True)


def test_our_faster_lookup_is_compared():
    [ratio] = lookup_ratios(example(), ["edit"])
    assert ratio.name == "ours fp32 suffix / transformers ngram, edit"
    assert (ratio.median, ratio.aim) == (3.0, 1.8)


def test_a_peer_loaded_separately_for_lookups_is_compared_once():
    measured = example() | {
        lookup_case("vllm fp32 lookup", "edit", "ngram"): measured_in([2.0, 4.0])
    }
    names = [ratio.name for ratio in lookup_ratios(measured, ["edit"])]
    assert names.count("ours fp32 suffix / vllm fp32 ngram, edit") == 1


def test_agreement_counts_tokens_before_the_first_difference():
    found = agreement(
        example(), lookup_case("ours fp32", "edit", "ngram"), plain_case("ours fp32", "edit")
    )
    assert (found.num_outputs, found.num_equal) == (2, 0)
    assert (found.num_equal_tokens, found.num_tokens) == (4, 6)
    assert num_common((1, 2), (1, 2, 3)) == 2
    assert num_common((), (1,)) == 0


def test_the_page_shows_figures_and_missing_peers():
    measured = example()
    report = PeersReport(
        command="python -m benchmarks.peers",
        machine=describe_machine(),
        model="m",
        num_rounds=2,
        max_tokens=3,
        peers=(
            PeerStatus("vllm fp32", "fp32", {}, 0.0, "no wheel"),
            PeerStatus("transformers", "fp32", {"torch": "2"}, 3.0),
        ),
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        ratios=tuple(lookup_ratios(measured, ["edit"])),
        agreements=(
            Agreement("vllm fp32, edit", 2, 2, 6, 6),
            Agreement("vllm bf16, edit", 2, 1, 3, 6),
            Agreement("transformers, edit", 2, 2, 6, 6),
        ),
    )
    page = markdown(report, ["edit"], "settings")
    assert "| ours fp32 suffix | 2.2 |  |" in page
    assert "| vllm fp32, transformers | 100% |\n| vllm bf16 | 50% |\n" in page
    assert "missing: no wheel" in page
    assert chart(report, ["edit"]).count("one stream, with") == 2  # with lookups, and without
