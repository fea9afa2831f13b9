"""Requests that are made without their constructor, which takes longer."""

from dataclasses import fields, replace

import pytest

from specdec.sequences.prediction import PredictedText
from specdec.sequences.sequence import EngineRequest
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.sampling.sampling_spec import Replay

OWN = {"seed": 7, "request_id": "own", "adapter_id": 3, "queue_deadline_s": 9.0}


@pytest.fixture
def received():
    """A request of a client, with no field at its default."""
    params = SamplingParams(max_tokens=3)
    budget = ThinkingBudget(5, (6,), bool)
    return GenerateRequest("a text", params, "model", "r", 1, (5,), 2, "salt", True, True, budget)


def test_a_request_has_the_fields_of_one_that_is_constructed(received):
    of_client = {each.name: getattr(received, each.name) for each in fields(received)}
    assert not [each for each in fields(received) if of_client[each.name] == each.default]
    more = OWN | {"grammar": object(), "prediction": PredictedText((1, 2))}
    constructed = EngineRequest(**of_client | more | {"prompt": (1, 2)})
    made = EngineRequest.of(received, (1, 2), **more)
    assert made == constructed
    names = {each.name for each in fields(EngineRequest)}
    assert names - vars(made).keys() == {"detokenize", "is_counted", "replay"}, (
        "left at their defaults"
    )
    assert vars(made).keys() <= names


def test_the_text_of_a_request_has_neither_prompt_nor_output(received):
    replay = Replay((434343, 434344))
    of_engine = EngineRequest.of(
        replace(received, prompt="private", resume_token_ids=(424242,)), (414141,), **OWN
    )
    shown = f"{received} {replace(of_engine, replay=replay)}"
    assert not [each for each in ("a text", "private", "41", "42", "43") if each in shown]
    assert "request_id='own'" in shown


@pytest.mark.parametrize("stop", [(), ("end",)])
def test_a_request_of_a_stream_differs_by_its_id_and_text(received, stop):
    request = EngineRequest.of(replace(received, params=SamplingParams(stop=stop)), (1, 2), **OWN)
    made = request.for_stream("unique", is_counted=True)
    assert made == replace(request, request_id="unique", detokenize=bool(stop))
    assert vars(made).keys() - vars(request).keys() == {"detokenize", "is_counted"}
    assert request.request_id == "own", "the request itself is unchanged"
