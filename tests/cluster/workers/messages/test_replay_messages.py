# Modules: cluster.workers.messages.serialization
"""Replays of outputs in messages to the ranks."""

from cluster.workers.messages import serialization
from specdec.types.messages import SequenceAdmission, StepInput
from specdec.types.sampling.sampling_spec import Replay, SamplingRules


def test_a_replay_arrives_with_its_masks():
    rules = SamplingRules(replay=Replay((7, 8), 1, 0.5, bytes(8)), prompt_logprobs=0)
    step = StepInput(1, (), (SequenceAdmission(0, 3, rules),), (), ())
    [received] = serialization.decode_step(serialization.encode_step(step)).admitted
    assert received.rules == rules
    assert isinstance(received.rules.replay, Replay)
