"""Outputs and ends of requests that are read in other processes."""

import pickle
from collections import defaultdict

import pytest

from specdec.engine.requests.outputs import Delivery, StepOutputs, TargetLostError
from specdec.engine.requests.remote_streams import RemoteStreams
from specdec.types.errors import GrammarError, NotReadyError, TargetFailedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason


class Sink:
    """Keeps what it receives, by kind."""

    def __init__(self):
        self.received = defaultdict(list)

    def deliver(self, step, newly_scheduled):
        self.received["outputs"] += step.outputs
        self.received["tokens"] += zip(step.request_ids, step.token_ids, strict=True)
        self.received["begun"] += newly_scheduled

    def close_stream(self, unique_id):
        self.received["closed"].append(unique_id)

    def expire(self, unique_ids):
        self.received["expired"] += unique_ids

    def fail(self, error):
        self.received["failed"].append(error)


def output(unique_id, **changes):
    fields = {"text": "", "finish_reason": None, "num_prompt_tokens": 1, "num_output_tokens": 1}
    fields |= {"token_ids": (5,), "speculation": SpeculationStats(), **changes}
    return EngineOutput(request_id=unique_id, **fields)


@pytest.fixture
def streams():
    return RemoteStreams()


def test_each_process_gets_its_outputs_and_the_rest_stays(streams):
    one, other = Sink(), Sink()
    streams.open("a", 1, one)
    streams.open("b", 2, other)
    outputs = [output("own"), output("a"), output("b"), output("a")]
    step = Delivery(outputs, ["a", "own", "b", "a"], [1, 2, 3, 4])
    own = Delivery([outputs[0]], ["own"], [2])
    assert streams.deliver(step, ("b", "own")) == (own, ("own",))
    tokens = [("a", 1), ("a", 4)]
    assert one.received == {"outputs": [outputs[1], outputs[3]], "tokens": tokens, "begun": []}
    assert other.received == {"outputs": [outputs[2]], "tokens": [("b", 3)], "begun": ["b"]}
    assert streams.of(one) == ["a"]


@pytest.mark.parametrize("error", [None, GrammarError("stuck")])
def test_a_request_ends_with_its_last_choice_or_an_error(streams, error):
    sink = Sink()
    streams.open("a", 2, sink)
    first = output("a", finish_reason=FinishReason.STOP)
    last = output("a", finish_reason=FinishReason.STOP, is_last=True)
    if error is not None:
        last = output("a", error=error)
    streams.deliver(Delivery([first]), ())
    assert (len(streams), streams.num_sequences) == (1, 1)
    streams.deliver(Delivery([last]), ())
    assert (len(streams), streams.num_sequences) == (0, 0)
    assert sink.received == {"outputs": [first, last], "tokens": [], "begun": [], "closed": ["a"]}


def test_the_error_of_a_lost_target_can_be_sent():
    error = pickle.loads(pickle.dumps(TargetLostError("rank 1 ended", StepOutputs())))
    assert type(error) is TargetFailedError
    assert str(error) == "rank 1 ended"


def test_expired_and_failed_requests_are_forgotten(streams):
    one, other = Sink(), Sink()
    for unique_id, sink in (("a", one), ("b", one), ("c", other)):
        streams.open(unique_id, 1, sink)
    assert streams.expire(["a", "own"]) == ["own"]
    assert one.received["expired"] == ["a"]
    error = NotReadyError("stopped")
    assert streams.fail(error) == ["b", "c"]
    assert one.received["failed"] == other.received["failed"] == [error]
    assert (len(streams), streams.num_sequences) == (0, 0)
    streams.close("a")
    assert streams.num_sequences == 0
