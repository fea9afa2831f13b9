"""`SamplingParams` with the arguments of vLLM's: translated, or refused with what to write."""

import logging
import pickle
from dataclasses import replace

import pytest

import specdec
from specdec import GuidedDecodingParams, SamplingParams, StructuredOutput, StructuredOutputsParams
from specdec.types.errors import InvalidValueError, UnknownNameError
from specdec.types.sampling import vllm_sampling

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("given", "structure"),
    [
        ({"json": SCHEMA}, StructuredOutput(json_schema='{"type": "object"}')),
        ({"json": '{"type": "array"}'}, StructuredOutput(json_schema='{"type": "array"}')),
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ({"choice": ["yes", "no"]}, StructuredOutput(choice=("yes", "no"))),
        ({"grammar": "start: A"}, StructuredOutput(grammar="start: A")),
        ({"json_object": True}, StructuredOutput(json_object=True)),
    ],
)
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("form", [StructuredOutputsParams, GuidedDecodingParams, dict])
def test_structured_output_in_vllms_words(name, form, given, structure):
    assert SamplingParams(**{name: form(**given)}) == SamplingParams(structured_output=structure)


def test_both_forms_are_accepted_under_both_names():
    ours, its = StructuredOutput(regex="a"), StructuredOutputsParams(regex="a")
    for name in ("structured_output", "structured_outputs"):
        for form in (ours, its):
            assert SamplingParams(**{name: form}).structured_output == ours


def test_all_tokens_are_kept_by_vllms_value_too():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(InvalidValueError, match="top_k is -2"):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize(
    "name",
    [
        *("stop", "stop_token_ids", "bad_words", "logit_bias", "logprob_token_ids"),
        *vllm_sampling.REFUSED,
    ],
)
def test_an_argument_that_is_none_counts_as_omitted(name):
    assert SamplingParams(**{name: None}, top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, False) for name, text in vllm_sampling.REFUSED.items() if "left out" in text),
        *((name, each) for name, values in vllm_sampling._NEUTRAL.items() for each in values),
        ("extra_args", {}),
        *(("logits_processors", each) for each in ([], ())),
    ],
)
def test_a_value_that_requests_nothing_counts_as_omitted(name, value):
    assert SamplingParams(**{name: value}, seed=1) == SamplingParams(seed=1)


def test_an_assignment_is_refused_with_what_to_write():
    params = SamplingParams(seed=1)
    with pytest.raises(AttributeError, match=r"write dataclasses.replace\(params, max_tok"):
        params.max_tokens = 64
    assert replace(params, max_tokens=64) == SamplingParams(seed=1, max_tokens=64)


@pytest.mark.parametrize("name", ["max_token", "guided_decoding", "best_of"])
def test_an_assignment_to_no_field_is_refused_without_advice_that_fails(name):
    with pytest.raises(AttributeError, match=f"'{name}': SamplingParams cannot be changed$"):
        setattr(SamplingParams(), name, 1)


class TaggedParams(SamplingParams):
    """Parameters with an attribute of a program."""

    def __init__(self, tag, **given):
        super().__init__(**given)
        self.tag = tag


def test_a_subclass_may_add_attributes():
    params = TaggedParams("a", seed=1)
    assert (params.tag, params.seed) == ("a", 1)
    for name in ("seed", "guided_decoding"):
        with pytest.raises(AttributeError, match=f"'{name}': TaggedParams cannot be changed"):
            setattr(params, name, 2)


def test_detokenize_is_noted_once(caplog):
    vllm_sampling._note_detokenize.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(detokenize=True) == SamplingParams()
        assert not caplog.records
        assert SamplingParams(detokenize=False) == SamplingParams(detokenize=False)
    [record] = caplog.records
    assert "detokenize=False has no effect" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_sampling": True}, r"left out: .* speculation=SpeculationOptions\("),
        ({"speculative_config": {}}, "it must be an argument of LLM"),
        ({"num_speculative_tokens": 3}, r"SpeculationOptions\(num_speculative_tokens=...\)"),
        ({"truncate_prompt_tokens": 64}, "prompt_token_ids"),
        ({"output_kind": 1}, "an argument of AsyncLLM.generate"),
        ({"logits_processors": [print]}, "use logit_bias, bad_words"),
        ({"best_of": 2}, "use n"),
        ({"skip_reading_prefix_cache": True}, "give the prompt a separate cache_salt"),
        ({"use_beam_search": True}, "beam search is not supported"),
        ({"spaces_between_special_tokens": 1}, "special tokens are not separated"),
        ({"thinking_token_budget": 64}, "left out: max_tokens limits"),
        ({"max_new_tokens": 9}, "written as max_tokens"),
        ({"detokenize": 1}, "detokenize is 1; it must be true or false"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_output.structural_tag is"),
        ({"structured_outputs": 3}, "structured_output is 3"),
        (
            {"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}},
            "left out where another name of it is given",
        ),
    ],
)
def test_the_error_states_what_to_write(given, message):
    with pytest.raises(InvalidValueError, match=message):
        SamplingParams(**given)


def test_an_unknown_name_has_the_nearest_one():
    with pytest.raises(UnknownNameError, match=r"'temprature'; did you mean temperature\?"):
        SamplingParams(temprature=0.5)
    with pytest.raises(UnknownNameError, match="'xyzzy'; known: n, temperature"):
        SamplingParams(xyzzy=1)


def test_it_is_still_a_dataclass():
    params = SamplingParams(1, 0.5, structured_outputs={"regex": "a"})
    assert (params.n, params.temperature) == (1, 0.5)
    assert replace(params, seed=3).structured_output == params.structured_output
    assert pickle.loads(pickle.dumps(params)) == params
    assert specdec.GuidedDecodingParams is GuidedDecodingParams
