# Modules: specdec.engine.receipts.issuing, specdec.engine.receipts.model
# Modules: specdec.engine.receipts.report, specdec.engine.requests.replays
# Modules: specdec.llm.receipts.engine_replay, specdec.llm.receipts.transformers_replay
"""Receipts of real answers: verified by other implementations, and every change is found."""

import json
import re
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams
from specdec.config.llm import LLMConfig
from specdec.engine.receipts.issuing import Answer
from specdec.engine.receipts.report import Outcome, default_tolerance
from specdec.llm.receipts.transformers_replay import TransformersReplayer
from specdec.llm.receipts.verification import verify_receipt
from specdec.types.errors import GrammarError, InvalidValueError, UnsupportedModelError
from specdec.types.reports.receipts import Opening, Receipt, Statement
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.engines import engine_config, local_engine, request
from tests.specdec.fakes import run_ranks
from tests.specdec.receipts import KEY, MAX_MODEL_LEN, SteppedReplayer, answers

PROMPT = tuple(range(5, 30))
CASES = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "min_p": 0.02, "top_p": 0.9, "top_k": 50},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "biases": {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -100.0}, "bad_words": ("the",)},
    "stop tokens": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": (7, 8, 9)},
    "stop strings": {"temperature": 1.0, "stop": ("e", "i"), "min_tokens": 5},
    "choices": {"temperature": 0.9, "n": 3},
    "end of text": {"temperature": 1.0, "ignore_eos": False, "logit_bias": {2: 6.0}},
}


@pytest.fixture(scope="module")
def replayer(tiny_model_dir):
    return SteppedReplayer(tiny_model_dir, local_engine(tiny_model_dir, engine_config(0)))


@pytest.fixture(scope="module")
def transformers_replayer(tiny_model_dir):
    config = LLMConfig(
        model=str(tiny_model_dir),
        speculative_config=None,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
    )
    return TransformersReplayer(tiny_model_dir, config)


@pytest.fixture(scope="module")
def receipts(tiny_model_dir, replayer):
    """Issue a receipt for each case, of answers that were drafted in one batch."""
    requests = [
        request(name, PROMPT, seed=11, **{"max_tokens": 60, **params})
        for name, params in CASES.items()
    ]
    found = answers(local_engine(tiny_model_dir, engine_config(3)), requests)
    return {each.request.request_id: replayer.receipt(each) for each in found}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_verified_in_another_batch_without_drafts(receipts, replayer, name):
    read = Receipt.from_json(json.dumps(receipts[name].to_mapping()))
    assert read == receipts[name]
    report = verify_receipt(read, replayer, public_key=KEY.public_key)
    assert report.outcome is Outcome.EQUAL, report
    assert len(report.choices) == CASES[name].get("n", 1)


@pytest.mark.parametrize("name", CASES)
def test_transformers_verifies_an_answer(receipts, transformers_replayer, name):
    report = verify_receipt(receipts[name], transformers_replayer)
    assert report.is_verified, report
    assert all(each.largest_tie < 1e-3 for each in report.choices)


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_find_the_same(tiny_model_dir, receipts, size):
    changed = resigned(receipts["truncated"], token_at={20: 77})

    def reports(group):
        engine = local_engine(tiny_model_dir, engine_config(0), group)
        own = SteppedReplayer(tiny_model_dir, engine)
        return [verify_receipt(each, own) for each in (*receipts.values(), changed)]

    ranks = run_ranks(size, reports)
    assert all(rank == ranks[0] for rank in ranks)
    *honest, forged = ranks[0]
    assert all(each.is_verified for each in honest)
    assert forged.choices[0].impossible.position == 20


def resigned(receipt, token_at=None, **changes):
    """Return a receipt of the service's own key for something else than it generated.

    parameters: those that change.
    """
    statement, opening = Statement.from_text(receipt.statement), receipt.opening
    parameters = {**statement.parameters, **changes.pop("parameters", {})}
    statement = replace(statement, parameters=parameters)
    outputs = [list(each) for each in opening.outputs]
    for position, token in (token_at or {}).items():
        outputs[0][position] = token
    outputs = tuple(map(tuple, outputs))
    return signed(replace(statement, **changes), opening.prompt_token_ids, outputs)


def signed(statement, prompt, outputs):
    from specdec.types.reports.receipts import output_digest, prompt_digest

    salt = bytes(16)
    choices = tuple(
        replace(each, num_tokens=len(output), digest=output_digest(salt, each.index, output))
        for each, output in zip(statement.choices, outputs, strict=True)
    )
    text = replace(statement, choices=choices, prompt_digest=prompt_digest(salt, prompt)).to_text()
    return Receipt(text, KEY.sign(text), KEY.public_key, Opening(salt.hex(), prompt, outputs))


@pytest.mark.parametrize("name", ["greedy", "sampled", "truncated", "penalties", "biases"])
def test_a_changed_token_is_the_first_impossible_position(receipts, replayer, name):
    outputs = receipts[name].opening.outputs[0]
    changed = resigned(receipts[name], token_at={30: (outputs[30] + 5) % 300 + 3})
    report = verify_receipt(changed, replayer)
    found = report.choices[0].impossible
    assert report.outcome is Outcome.IMPOSSIBLE
    assert (found.position, found.expected) == (30, outputs[30])
    assert found.margin > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 12},
        {"parameters": {"temperature": 0.8}},
        {"parameters": {"top_k": 3}},
        {"parameters": {"logit_bias": {"70": 4.0}}},
    ],
    ids=str,
)
def test_other_settings_than_claimed_are_found(receipts, replayer, changes):
    report = verify_receipt(resigned(receipts["sampled"], **changes), replayer)
    assert report.outcome is Outcome.IMPOSSIBLE
    assert report.choices[0].impossible.position < 40


def test_an_answer_that_ends_elsewhere_is_found(receipts, replayer):
    statement = Statement.from_text(receipts["sampled"].statement)
    prompt, outputs = (
        receipts["sampled"].opening.prompt_token_ids,
        receipts["sampled"].opening.outputs,
    )
    short = verify_receipt(signed(statement, prompt, (outputs[0][:50],)), replayer)
    assert short.choices[0].impossible.position == 49
    assert short.choices[0].impossible.reason == "the text does not end here"
    [choice] = statement.choices
    other = replace(statement, choices=(replace(choice, finish_reason="stop"),))
    wrong = verify_receipt(signed(other, prompt, outputs), replayer)
    assert wrong.choices[0].impossible.reason == "the text ends here by length"
    shorter = replace(statement, parameters={**statement.parameters, "max_tokens": 40})
    long = verify_receipt(signed(shorter, prompt, outputs), replayer)
    assert (long.choices[0].impossible.position, long.choices[0].impossible.reason) == (
        40,
        "the text ends before it",
    )


def test_a_token_outside_the_vocabulary_is_impossible(receipts, replayer):
    report = verify_receipt(resigned(receipts["sampled"], token_at={3: 10**6}), replayer)
    found = report.choices[0].impossible
    assert (found.position, found.reason) == (3, "it is no token of the model")


def test_a_token_of_a_message_may_be_negative(receipts, replayer):
    report = verify_receipt(resigned(receipts["sampled"], token_at={3: -1}), replayer)
    assert report.choices[0].impossible.position == 3


def test_digits_of_a_key_have_any_case(receipts, replayer):
    report = verify_receipt(receipts["greedy"], replayer, public_key=KEY.public_key.upper())
    assert report.outcome is Outcome.EQUAL


def test_numbers_of_tokens_are_those_of_the_statement(receipts, replayer):
    statement = Statement.from_text(receipts["sampled"].statement)
    opening = receipts["sampled"].opening
    wrong = replace(statement, num_prompt_tokens=3)
    report = verify_receipt(signed(wrong, opening.prompt_token_ids, opening.outputs), replayer)
    assert report.reason == "the prompt does not have 3 tokens"


def test_changes_without_the_key_are_found(receipts, replayer):
    receipt = receipts["sampled"]
    opening, [output] = receipt.opening, receipt.opening.outputs
    changed = replace(opening, outputs=((*output[:-1], output[-1] + 1),))
    shorter = replace(opening, outputs=(output[:-1],))
    prompt = replace(opening, prompt_token_ids=(*opening.prompt_token_ids, 4))
    for forged, reason in [
        (replace(receipt, opening=changed), "the tokens of choice 0 do not match their digest"),
        (replace(receipt, opening=prompt), "the prompt does not match its digest"),
        (
            replace(receipt, opening=shorter),
            "the outputs do not have the numbers of tokens of the choices",
        ),
        (
            replace(receipt, statement=receipt.statement.replace('"seed":11', '"seed":12')),
            "the signature does not match the statement",
        ),
        (replace(receipt, public_key="00" * 32), "the signature does not match the statement"),
        (replace(receipt, signature="no hex"), "the signature does not match the statement"),
    ]:
        report = verify_receipt(forged, replayer)
        assert (report.outcome, report.reason) == (Outcome.FORGED, reason)
    other_key = verify_receipt(receipt, replayer, public_key="ab" * 32)
    assert other_key.reason == "the receipt is signed by another key"


def test_what_cannot_be_verified_is_named(receipts, replayer):
    receipt = receipts["sampled"]
    statement = Statement.from_text(receipt.statement)
    model = statement.model
    for unverifiable, reason in [
        (replace(receipt, opening=None), "the receipt has no tokens (opening)"),
        (resigned(receipt, noise=2), "noise version 2 is not 1"),
        (resigned(receipt, verifier="rejection"), "receipt is True; it must be false with"),
        (resigned(receipt, model=replace(model, fingerprint="0")), "model.fingerprint is '0' in"),
        (resigned(receipt, model=replace(model, quantization="int8")), "model.quantization is"),
        (resigned(receipt, parameters={"beams": 4}), "receipt.parameters is ['beams']"),
        (
            signed(replace(statement, parameters={"top_p": 1.0}), PROMPT, receipt.opening.outputs),
            "receipt.parameters is ['min_p', 'repetition_penalty', 'temperature', 'top_k']",
        ),
    ]:
        report = verify_receipt(unverifiable, replayer)
        assert report.outcome is Outcome.UNVERIFIABLE
        assert report.reason.startswith(reason)


def test_resumed_tokens_are_the_clients(tiny_model_dir, replayer, receipts):
    """The continuation by the service is verified, whatever the client supplied before it."""
    known = (300, 301, 302)
    each = replace(
        request("r", PROMPT, seed=3, temperature=1.0, max_tokens=40), resume_token_ids=known
    )
    [answer] = answers(local_engine(tiny_model_dir, engine_config(3)), [each])
    receipt = replayer.receipt(answer)
    assert Statement.from_text(receipt.statement).num_resumed_tokens == 3
    report = verify_receipt(receipt, replayer)
    assert (report.outcome, report.choices[0].num_resumed) == (Outcome.EQUAL, 3)
    assert (
        verify_receipt(resigned(receipt, num_resumed_tokens=0), replayer)
        .choices[0]
        .impossible.position
        == 0
    )


def test_an_llm_verifies_grammars_and_refuses_nothing_else(tiny_model_dir, transformers_replayer):
    params = SamplingParams(
        temperature=1.0, max_tokens=30, structured_output=StructuredOutput(regex="[a-z ]{40}")
    )
    with LLM(str(tiny_model_dir), speculative_config=None, device="cpu") as llm:
        engine = llm._llm_engine
        [output] = llm.generate({"prompt_token_ids": PROMPT}, replace(params, seed=5), False)
        [choice] = output.outputs
        grammar = engine.compile(params.structured_output, params.n)
        answer = Answer(request("r", PROMPT, seed=5))
        answer.request = replace(answer.request, params=params, grammar=grammar)
        end = local_end(choice)
        answer.add(end)
        receipt = SteppedReplayer(tiny_model_dir, None, 512).receipt(answer)
        assert llm.verify(receipt).outcome is Outcome.EQUAL
        bad = resigned(receipt, token_at={7: 0})  # a special token
        found = llm.verify(bad).choices[0].impossible
        assert (found.position, found.margin) == (7, None), "the grammar masks the token"
    large = replace(transformers_replayer.receipt_model, max_model_len=512)
    transformers_replayer.receipt_model = large
    assert verify_receipt(receipt, transformers_replayer).is_verified


def test_an_answer_after_reasoning_is_verified(tiny_model_dir):
    marks = ReasoningMarks((), (*"aeiou",), begins_inside=True)
    spec = StructuredOutput(regex="[a-z ]{40}", reasoning=marks)
    params = SamplingParams(temperature=1.0, max_tokens=40, structured_output=spec, seed=5)
    with LLM(str(tiny_model_dir), speculative_config=None, device="cpu") as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, False)
        text = output.outputs[0].text
        assert re.fullmatch(r"(?s:.+?)[aeiou]\s{0,4}[a-z ]+", text)
        assert re.search("[^a-z ]", text)
        answer = Answer(request("r", PROMPT, seed=5))
        grammar = llm._llm_engine.compile(spec, 1)
        answer.request = replace(answer.request, params=params, grammar=grammar)
        answer.add(local_end(output.outputs[0]))
        receipt = SteppedReplayer(tiny_model_dir, None, 512).receipt(answer)
        assert llm.verify(receipt).outcome is Outcome.EQUAL
        bad = resigned(receipt, token_at={len(output.outputs[0].token_ids) - 2: 0})
        assert llm.verify(bad).choices[0].impossible.margin is None, "the grammar masks the token"


def test_a_failed_grammar_leaves_an_answer_unverified(receipts, replayer, monkeypatch):
    def fail(*_):
        raise GrammarError("too many states")

    monkeypatch.setattr(replayer, "replay", fail)
    report = verify_receipt(receipts["sampled"], replayer)
    assert (report.outcome, report.reason) == (Outcome.UNVERIFIABLE, "too many states")


def local_end(choice):
    from specdec.types.reports.stats import SpeculationStats
    from specdec.types.responses import EngineOutput, FinishReason

    reason = FinishReason(choice.finish_reason)
    return EngineOutput("r", tuple(choice.token_ids), "", reason, 25, 0, SpeculationStats())


def test_a_model_that_transformers_cannot_load_is_unsupported(tiny_model_dir, monkeypatch):
    def fail(*_arguments, **_options):
        raise ValueError("unknown architecture")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    config = LLMConfig(model=str(tiny_model_dir), speculative_config=None, device="cpu")
    with pytest.raises(UnsupportedModelError, match="transformers cannot load it: unknown arch"):
        TransformersReplayer(tiny_model_dir, config)


def test_transformers_has_no_counterpart_of_quantization(tiny_model_dir):
    config = LLMConfig(
        model=str(tiny_model_dir), speculative_config=None, device="cpu", quantization="int8"
    )
    with pytest.raises(InvalidValueError, match="quantization is 'int8'; it must be none for"):
        TransformersReplayer(tiny_model_dir, config)


def test_the_tolerance_follows_from_the_arithmetic():
    def tolerance(dtype, quantization="none", kv_cache_dtype="auto"):
        return default_tolerance(dtype, quantization, kv_cache_dtype)

    exact, rounded = tolerance("float32"), tolerance("bfloat16")
    assert exact < tolerance("float16") < rounded
    assert exact < tolerance("float32", "int8") < tolerance("float32", "w8a8")
    assert tolerance("bfloat16", "int8") == rounded
    assert tolerance("float32", kv_cache_dtype="fp8") == rounded
    assert tolerance("float32", "int8", "fp8") == rounded
