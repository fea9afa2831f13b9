"""The format of receipts: canonical text, digests, and strict reading of foreign data."""

import hashlib
import json

import pytest

from specdec.types.errors import InvalidValueError
from specdec.types.reports import receipts
from specdec.types.reports.receipts import (
    Opening,
    Receipt,
    ReceiptChoice,
    ReceiptModel,
    Statement,
    output_digest,
    parameters_of,
    params_from,
    prompt_digest,
)
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    StructuredOutput,
)

MODEL = ReceiptModel("m", "f" * 64, "float32", "none", "auto", 512, (2,))
STATEMENT = Statement(
    MODEL,
    2**63 - 1,
    "coupled",
    {"temperature": 0.1},
    3,
    "a" * 64,
    (ReceiptChoice(0, 2, "b", "stop"),),
)
RECEIPT = Receipt(STATEMENT.to_text(), "aa", "bb", Opening("00", (1, 2, 3), ((4, 5),)))


def test_text_and_mapping_are_read_back():
    assert Statement.from_text(STATEMENT.to_text()) == STATEMENT
    assert Receipt.from_json(json.dumps(RECEIPT.to_mapping())) == RECEIPT


def test_the_receipt_of_a_whole_answer_is_read():
    answer = {"id": "cmpl-r", "choices": [], "receipts": [RECEIPT.to_mapping()]}
    assert Receipt.from_json(json.dumps(answer)) == RECEIPT
    for found in ([], answer["receipts"] * 2):
        with pytest.raises(InvalidValueError, match=f"receipts is {len(found)}; it must be 1"):
            Receipt.from_json(json.dumps({**answer, "receipts": found}))


def test_digests_are_chains_from_salt_choice_and_domain():
    link = hashlib.sha256(b"specdec receipt output 1\0" + b"salt" + b"\1\0\0\0").digest()
    link = hashlib.sha256(link + b"\7\0\0\0").digest()
    assert output_digest(b"salt", 1, [7]) == link.hex()
    assert output_digest(b"salt", 1, [7, 8]) == hashlib.sha256(link + b"\x08\0\0\0").hexdigest()
    assert output_digest(b"salt", 0, [7]) != link.hex() != output_digest(b"sale", 1, [7])
    assert prompt_digest(b"s", [7, 8]) != prompt_digest(b"s", [8, 7])


def test_tokens_of_messages_have_digests_though_none_is_a_token():
    assert prompt_digest(b"s", [-1]) != prompt_digest(b"s", [1])


@pytest.mark.parametrize("salt", ["", "00", "00" * 17, "no hex"])
def test_a_salt_has_one_length(salt):
    """So that no byte can pass for a part of the salt, and then of the tokens."""
    with pytest.raises(InvalidValueError, match="16 bytes in hexadecimal"):
        Opening(salt, (1,), ((2,),)).salt_bytes  # noqa: B018


@pytest.mark.parametrize("token", ["05", " 5", "x", "\u0665", "9" * 5000])
def test_a_bias_has_a_token_in_one_spelling(token):
    kept = parameters_of(SamplingParams(), SamplingDefaults())
    assert params_from({**kept, "logit_bias": {"5": 1.0}}).logit_bias == {5: 1.0}
    with pytest.raises(InvalidValueError, match="logit_bias"):
        params_from({**kept, "logit_bias": {"5": 1.0, token: 2.0}})


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_parameter_without_a_value_is_missing(name):
    kept = parameters_of(SamplingParams(), SamplingDefaults())
    params_from(kept)
    with pytest.raises(InvalidValueError, match=name):
        params_from({**kept, name: None})


@pytest.mark.parametrize("reasoning", [None, ReasoningMarks(("a", "b"), ("c",), True)])
def test_parameters_that_determine_tokens_are_read_back(reasoning):
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        max_tokens=9,
        logit_bias={7: -1.5},
        bad_words=("a",),
        allowed_token_ids=(1, 7),
        stop=("end",),
        structured_output=StructuredOutput(choice=("a", "b"), reasoning=reasoning),
        logprobs=3,
    )
    kept = parameters_of(params, params.resolved(SamplingDefaults(top_p=0.25)))
    assert kept["top_p"] == 0.25
    assert "logprobs" not in kept
    read = params_from(json.loads(json.dumps(kept)))
    assert parameters_of(read, read.resolved(SamplingDefaults())) == kept
    assert read.structured_output == params.structured_output


@pytest.mark.parametrize("marks", [7, {}, {"closings": ["a"], "other": 1}])
def test_marks_that_are_none_are_rejected(marks):
    kept = parameters_of(SamplingParams(), SamplingDefaults())
    form = {"regex": "a", "reasoning": marks}
    with pytest.raises(InvalidValueError, match=r"structured_output\.reasoning"):
        params_from({**kept, "structured_output": form})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "receipt is []; it must be a JSON object"),
        ("{", "it must be JSON"),
        ('{"statement": NaN}', "it must be JSON"),
        ('{"statement": "a", "statement": "b"}', "a name occurs twice"),
        ('{"statement": "", "signature": ""}', "public_key"),
        ('{"statement": 1, "signature": "", "public_key": ""}', "receipt.statement is 1"),
        (json.dumps({**RECEIPT.to_mapping(), "more": 1}), "more"),
        (json.dumps({**RECEIPT.to_mapping(), "opening": {"salt": "00"}}), "outputs"),
        (
            json.dumps(
                {
                    **RECEIPT.to_mapping(),
                    "opening": {"salt": "00", "prompt_token_ids": [-1], "outputs": [[1]]},
                }
            ),
            "token ids",
        ),
    ],
)
def test_anything_else_is_rejected(text, reason):
    with pytest.raises(InvalidValueError) as caught:
        Receipt.from_json(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("name", "limit"), [("MAX_RECEIPT_BYTES", 9), ("MAX_TOKENS", 2)])
def test_sizes_are_limited(monkeypatch, name, limit):
    text = json.dumps(RECEIPT.to_mapping())
    monkeypatch.setattr(receipts, name, limit)
    with pytest.raises(InvalidValueError, match=f"at most {limit}"):
        Receipt.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 1.5),
        ("version", 2),
        ("verifier", "none"),
        ("choices", []),
        ("choices", [{"index": 1, "num_tokens": 2, "digest": "b", "finish_reason": "stop"}]),
        ("num_resumed_tokens", -1),
        ("num_resumed_tokens", 2),
        ("model", {}),
        ("parameters", 3),
        ("other", 3),
    ],
)
def test_a_statement_with_other_fields_or_values_is_rejected(name, value):
    changed = json.dumps({**json.loads(STATEMENT.to_text()), name: value})
    with pytest.raises(InvalidValueError):
        Statement.from_text(changed)
