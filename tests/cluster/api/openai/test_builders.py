# Modules: cluster.api.base.openai_schema, cluster.api.openai.schemas.completion_schema
# Modules: cluster.api.openai.usage
"""Calls built from requests, token usage, and large responses, which are built on a thread."""

import math
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest

from cluster.api.base.authentication import ApiKeys
from cluster.api.base.openai_schema import PlainBody, Usage
from cluster.api.http.bodies import ApiRequest
from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.builders import MANY_TOKENS, ResponseBuilder, offload, with_seed
from cluster.api.openai.chat import ChatWriter
from cluster.api.openai.completion import CompletionWriter, Echo, completion_params
from cluster.api.openai.conversation import configured_tool_format
from cluster.api.openai.parsers.tool_format import HERMES, LLAMA
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.completion_schema import CompletionRequest
from cluster.api.openai.schemas.sampling_fields import COPIED, SamplingFields, sampling_params
from cluster.api.openai.usage import UsageMeter
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions


def output(num_output_tokens, *, choice=0, num_cached_tokens=0, verifier="coupled"):
    stats = SpeculationStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=4)
    return EngineOutput(
        "r",
        (1,),
        "",
        None,
        num_prompt_tokens=5,
        num_output_tokens=num_output_tokens,
        speculation=stats,
        choice=choice,
        num_cached_tokens=num_cached_tokens,
        verifier=verifier,
    )


def test_an_output_counts_all_choices_of_its_prompt():
    meter = UsageMeter()
    assert not meter.has_output
    meter.add(0, output(1, num_cached_tokens=3))
    meter.add(0, output(2, choice=1, num_cached_tokens=5))  # computed for choice 0
    usage = Usage(**meter.usage())
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 2, 7)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_prompts_are_added_up():
    meter = UsageMeter()
    for prompt in range(3):
        meter.add(prompt, output(4, num_cached_tokens=1))
    usage = Usage(**meter.usage(num_hidden_tokens=2))
    assert (usage.prompt_tokens, usage.completion_tokens) == (15, 10)
    assert usage.prompt_tokens_details.cached_tokens == 3
    speculation = usage.completion_tokens_details.speculation
    assert (speculation.num_drafts, speculation.num_accepted_tokens) == (6, 12)
    assert (speculation.acceptance_rate, speculation.mean_acceptance_length) == (0.5, 3)


@pytest.mark.parametrize(
    ("verifier", "is_lossless"), [("block", True), ("typical", False), ("synthetic", False)]
)
def test_a_lossy_verifier_is_reported(verifier, is_lossless):
    meter = UsageMeter()
    meter.add(0, output(1, verifier=verifier))
    speculation = Usage(**meter.usage()).completion_tokens_details.speculation
    assert (speculation.verifier, speculation.is_lossless) == (verifier, is_lossless)


def test_answers_share_no_part_of_their_usage():
    meter = UsageMeter()
    meter.add(0, output(1))
    first, expected = meter.usage(), deepcopy(meter.usage())
    first["completion_tokens_details"]["speculation"].clear()
    first["prompt_tokens_details"].clear()
    assert meter.usage() == expected


def test_a_number_that_json_does_not_have_is_null():
    assert PlainBody({"logprob": -math.inf, "others": [math.nan]}).to_json() == (
        b'{"logprob":null,"others":[null]}'
    )


def test_a_stop_without_a_token_in_the_last_output_matched_none(tokenizer):
    """The end of the sequence may be cut, as a chat reports it too."""
    request = CompletionRequest(prompt="a")
    writer = CompletionWriter(0, request, None, Echo((5,), ""), tokenizer)
    writer.add(output(1)._replace(token_ids=(7,), finish_reason=None))
    writer.add(output(1)._replace(token_ids=(), finish_reason=FinishReason.STOP))
    choice = writer.choice()
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", None)


def test_an_answer_that_has_not_ended_is_no_complete_chat():
    request = ChatRequest(messages=[{"role": "user", "content": "a"}])
    writer = ChatWriter(0, request, AnswerReading(None, None), None)
    writer.add(output(1)._replace(finish_reason=None))
    with pytest.raises(AssertionError, match="finish reason"):
        writer.choice()


@pytest.mark.parametrize("is_large", [False, True])
async def test_only_large_work_runs_on_a_thread(is_large):
    thread = await offload(threading.get_ident, is_large=is_large)
    assert (thread != threading.get_ident()) == is_large


@pytest.mark.parametrize(
    ("num_tokens", "prompt", "names", "many"),
    [
        (MANY_TOKENS + 1, None, "names", True),
        (MANY_TOKENS, None, "names", False),
        (1, "some", "names", True),
        (MANY_TOKENS + 1, "some", None, False),
    ],
)
def test_logprobs_of_a_prompt_or_of_many_tokens_are_large(num_tokens, prompt, names, many):
    output = SimpleNamespace(token_ids=(1,) * num_tokens, prompt_logprobs=prompt)
    builder = SimpleNamespace(names=names)
    assert ResponseBuilder.is_large(builder, output) == many


LLAMA_TEMPLATE = SimpleNamespace(
    text='{"name": function name, "parameters": ...}', takes_tools=True
)


@pytest.mark.parametrize(
    ("parser", "form"), [("auto", LLAMA), ("hermes", HERMES), ("llama3_json", LLAMA)]
)
def test_the_format_of_calls_is_configured_or_from_the_template(parser, form):
    assert configured_tool_format(SimpleNamespace(tool_call_parser=parser), LLAMA_TEMPLATE) is form


@pytest.mark.parametrize("takes_tools", [False, True])
@pytest.mark.parametrize("parser", ["auto", "hermes"])
def test_the_format_is_assumed_where_a_template_with_tools_has_no_known_one(parser, takes_tools):
    template = SimpleNamespace(text="Action: ```json", takes_tools=takes_tools)
    form = configured_tool_format(SimpleNamespace(tool_call_parser=parser), template)
    assert (form.name, form.is_assumed) == ("hermes", parser == "auto" and takes_tools)


@pytest.mark.parametrize(("asked", "timeout_s"), [(None, 60), ("5", 5), ("0.5", 0.5), ("99", 60)])
def test_the_timeout_is_the_smaller_of_the_header_and_the_configuration(asked, timeout_s):
    router = SimpleNamespace(config=SimpleNamespace(request_timeout_s=60.0))
    handler = RequestHandler(lambda: router, ApiKeys)
    headers = [] if asked is None else [(b"x-request-timeout-s", asked.encode())]
    request = ApiRequest({"type": "http", "headers": headers}, receive=None)
    assert handler.context(request, None).deadline.timeout_s == timeout_s
    assert handler.context(request, "in-the-body").request_id == "in-the-body"


def test_a_seed_is_chosen_unless_it_is_given():
    seeds = iter((3, 1, 4))
    router = SimpleNamespace(new_seed=lambda: next(seeds))
    assert with_seed(SamplingParams(seed=7), router).seed == 7
    chosen = {with_seed(SamplingParams(), router).seed for _ in range(3)}
    assert None not in chosen
    assert len(chosen) == 3


def test_every_copied_field_reaches_the_engine():
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
        "logprob_token_ids": [3],
    }
    assert set(values) == set(COPIED)
    params = sampling_params(SamplingFields.model_validate(values))
    for name, value in values.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name


def test_defaults_have_the_types_of_their_fields():
    dumped = CompletionRequest(prompt="a").model_dump(warnings="error")
    assert dumped["resume_token_ids"] == []


def test_other_fields_are_converted_for_the_engine():
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
def test_vllms_top_k_for_all_tokens_is_converted(asked, top_k):
    assert sampling_params(SamplingFields(top_k=asked)).top_k == top_k


@pytest.mark.parametrize(("asked", "max_tokens"), [(None, 16), (0, 1), (7, 7)])
def test_max_tokens_of_a_completion_is_sixteen_by_default(asked, max_tokens):
    request = CompletionRequest(prompt="x", max_tokens=asked)
    assert completion_params(request).max_tokens == max_tokens
