"""What is decided before the first token, by request and by configuration."""

from types import SimpleNamespace

import pytest
from fastapi import Request

from cluster.api.api_keys import ApiKeys
from cluster.api.openai.chat import tool_form
from cluster.api.openai.completion import completion_params
from cluster.api.openai.completion_schema import CompletionRequest
from cluster.api.openai.request_builder import settle_seed
from cluster.api.openai.request_handler import Gate
from cluster.api.openai.sampling_fields import COPIED, SamplingFields, sampling_params
from cluster.api.openai.tool_format import HERMES, LLAMA
from specdec.types.sampling_params import SamplingParams, SpeculationOptions

LLAMA_TEMPLATE = SimpleNamespace(text='{"name": function name, "parameters": ...}')


@pytest.mark.parametrize(
    ("parser", "form"), [("auto", LLAMA), ("hermes", HERMES), ("llama3_json", LLAMA)]
)
def test_the_format_of_calls_is_configured_or_the_templates(parser, form):
    assert tool_form(SimpleNamespace(tool_call_parser=parser), LLAMA_TEMPLATE) is form


@pytest.mark.parametrize(("asked", "timeout_s"), [(None, 60), ("5", 5), ("0.5", 0.5), ("99", 60)])
def test_an_answer_takes_no_longer_than_asked_for_and_than_configured(asked, timeout_s):
    router = SimpleNamespace(config=SimpleNamespace(request_timeout_s=60.0))
    gate = Gate(lambda: router, ApiKeys)
    headers = [] if asked is None else [(b"x-request-timeout-s", asked.encode())]
    request = Request({"type": "http", "headers": headers})
    request.state.request_id = "made-up"
    assert gate.terms(request, None).deadline.timeout_s == timeout_s
    assert gate.terms(request, "in-the-body").request_id == "in-the-body"


def test_a_seed_is_chosen_where_none_is_given():
    assert settle_seed(SamplingParams(seed=7)).seed == 7
    chosen = {settle_seed(SamplingParams()).seed for _ in range(3)}
    assert None not in chosen
    assert len(chosen) == 3


def test_every_field_that_is_copied_reaches_the_engine():
    values = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 3,
        "ignore_eos": True,
        "min_tokens": 1,
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2],
        "prompt_logprobs": 1,
    }
    assert set(values) == set(COPIED)
    params = sampling_params(SamplingFields.model_validate(values))
    for name, value in values.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name


def test_the_other_fields_reach_it_in_its_own_words():
    request = CompletionRequest.model_validate(
        {
            "prompt": "x",
            "stop": "end",
            "logit_bias": {"5": -1},
            "speculation": {"method": "ngram", "verifier": "threshold"},
        }
    )
    params = sampling_params(request, max_tokens=4, logprobs=None)
    assert (params.stop, params.logit_bias, params.max_tokens) == (("end",), {5: -1}, 4)
    assert params.speculation == SpeculationOptions(method="ngram", verifier="threshold")


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (5, 5)])
def test_a_top_k_of_vllms_all_is_ours(asked, top_k):
    assert sampling_params(SamplingFields(top_k=asked)).top_k == top_k


@pytest.mark.parametrize(("asked", "most"), [(None, 16), (0, 1), (7, 7)])
def test_a_completion_has_sixteen_tokens_unless_said(asked, most):
    assert completion_params(CompletionRequest(prompt="x", max_tokens=asked)).max_tokens == most
