# Modules: specdec.types.sampling.sampling_spec
from dataclasses import fields, replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.requests.sampling_resolver import resolve
from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier

CODE, PROSE = "def add(a, b):\n    return", "The river begins as a thread of cold water."


@pytest.fixture(scope="module")
def settle(tiny_model_dir):
    model, tokenizer = ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir)

    def settle(options, service=None, prompt=PROSE, allow_override=True, **params):
        given = SamplingParams(speculation=SpeculationOptions(**options), **params)
        tokens = tokenizer.encode(prompt)
        return resolve(given, 0, model, tokenizer, service, tokens, allow_override=allow_override)

    return settle


def test_the_rules_have_their_fields_and_no_others(settle):
    given = vars(settle({})).keys()
    assert {each.name for each in fields(SamplingRules)} - given == {"choice", "replay"}
    assert all(hasattr(SamplingRules, each) for each in given)


def test_the_default_verifier_is_coupled(settle):
    assert settle({}).verifier == Verifier("coupled", 0.09, 0.3, 0.75)
    assert not settle({}).scale_draft_temperature


def test_unset_options_default_to_the_services(settle):
    service = SpeculativeConfig.of(
        verifier="typical",
        typical_epsilon=0.2,
        typical_delta=0.5,
        acceptance_threshold="medium",
        scale_draft_temperature=True,
    )
    rules = settle({}, service)
    assert rules.verifier == Verifier("typical", 0.2, 0.5, 0.65)
    assert rules.scale_draft_temperature
    asked = {"verifier": "threshold", "typical_epsilon": 0.0, "acceptance_threshold": 0.0}
    rules = settle({**asked, "scale_draft_temperature": False}, service)
    assert rules.verifier == Verifier("threshold", 0.0, 0.5, 0.0)
    assert not rules.scale_draft_temperature


@pytest.mark.parametrize(
    ("prompt", "structured_output", "threshold"),
    [
        (PROSE, None, 0.5),
        (CODE, None, 0.75),
        (CODE, StructuredOutput(json_object=True), 0.65),
        (PROSE, StructuredOutput(regex="a+"), 0.65),
    ],
)
def test_auto_threshold_depends_on_prompt_and_structured_output(
    settle, prompt, structured_output, threshold
):
    params = {"prompt": prompt, "structured_output": structured_output}
    assert settle({"verifier": "threshold"}, **params).verifier.threshold == threshold
    chosen = {"verifier": "threshold", "acceptance_threshold": "strict"}
    assert settle(chosen, **params).verifier.threshold == 0.75
    assert settle({"verifier": "confidence"}, **params).verifier.threshold == threshold


def test_a_verifier_that_is_not_allowed_is_rejected(settle):
    service = SpeculativeConfig.of(verifier="block", allowed_verifiers=("block",))
    assert settle({}, service).verifier.name == "block"
    with pytest.raises(InvalidValueError, match=r"speculation\.verifier is 'coupled'"):
        settle({"verifier": "coupled"}, service)


def test_other_choices_differ_in_noise_and_report_no_prompt_logprobs(settle):
    rules = settle({}, bad_words=("river",), prompt_logprobs=2)
    assert (rules.choice, rules.prompt_logprobs) == (0, 2)
    assert rules.of_choice(3) == replace(rules, choice=3, prompt_logprobs=None)


def test_allowed_tokens_are_deduplicated_and_bounded_by_the_vocabulary(settle, tiny_model_dir):
    vocab_size = ModelConfig.from_directory(tiny_model_dir).vocab_size
    assert settle({}, allowed_token_ids=(7, 5, 7)).allowed_token_ids == (5, 7)
    assert len(settle({}, allowed_token_ids=(5,) * vocab_size).allowed_token_ids) == 1
    with pytest.raises(InvalidValueError, match=f"allowed_token_ids length .* {vocab_size} "):
        settle({}, allowed_token_ids=(5,) * (vocab_size + 1))


def test_stop_tokens_outside_the_vocabulary_are_ignored(settle, tiny_model_dir):
    model = ModelConfig.from_directory(tiny_model_dir)
    others = (-1, model.vocab_size, 2**31 - 1, 10**12)
    assert settle({}, stop_token_ids=(7, *others)) == settle({}, stop_token_ids=(7,))
    assert settle({}, stop_token_ids=others).end_token_ids == tuple(sorted(model.eos_token_ids))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"verifier": "oracle"}, "verifier"),
        ({"typical_epsilon": 1.1}, "typical_epsilon"),
        ({"typical_delta": -0.1}, "typical_delta"),
        ({"acceptance_threshold": "mild"}, "acceptance_threshold"),
        ({"acceptance_threshold": 2.0}, "acceptance_threshold"),
        ({"allowed_verifiers": ("coupled", "oracle")}, "allowed_verifiers[1]"),
        ({"allowed_verifiers": ()}, "verifier"),
        ({"allowed_verifiers": ("block",)}, "verifier"),
    ],
)
def test_verifier_options_of_the_service_are_validated(changes, field):
    with pytest.raises(InvalidValueError) as error:
        SpeculativeConfig.of(**changes)
    assert error.value.field == f"speculative_config.{field}"


@pytest.mark.parametrize(
    ("name", "temperature", "acting", "needs_draft_probs"),
    [
        ("coupled", 1.0, "coupled", False),
        ("rejection", 1.0, "rejection", True),
        ("block", 0.5, "block", True),
        ("rejection", 0.0, "coupled", False),
        ("block", 0.0, "coupled", False),
        ("typical", 0.0, "typical", False),
        ("threshold", 1.0, "threshold", False),
        ("confidence", 0.0, "confidence", False),
    ],
)
def test_lossless_verifiers_are_coupled_at_temperature_0(
    name, temperature, acting, needs_draft_probs
):
    rules = SamplingRules(temperature=temperature, verifier=Verifier(name))
    assert rules.acting_verifier == acting
    assert rules.needs_draft_probs == needs_draft_probs
    assert rules.needs_confidences == (name == "confidence")


def test_the_confidence_threshold_is_the_requests_where_it_may_override(settle):
    assert settle({}).draft_confidence_threshold is None
    asked = {"draft_confidence_threshold": 0.3}
    assert settle(asked).draft_confidence_threshold == 0.3
    assert settle(asked, allow_override=False).draft_confidence_threshold is None
