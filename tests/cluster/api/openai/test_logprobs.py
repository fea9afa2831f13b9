"""Log-probabilities in the formats of the API."""

import json
import math

import numpy as np
import pytest

from cluster.api.openai.logprobs import (
    LOWEST_LOGPROB,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    concatenate,
    prompt_logprobs,
)
from specdec.text.vocab_bytes import TokenBytes
from specdec.types.messages import Logprobs


@pytest.fixture(scope="module")
def token_bytes(tiny_model_dir):
    from specdec.text.tokenizer import Tokenizer

    return TokenBytes(Tokenizer(tiny_model_dir))


@pytest.fixture(scope="module")
def positions(tokenizer):
    """Two positions, each with two most likely tokens; the first own token is not among them."""
    a, b, c = (tokenizer.encode(each, add_special_tokens=False)[0] for each in "abc")
    return Logprobs(
        np.array([[a, b, c], [b, b, c]], np.int32),
        np.array([[-3.0, -1.0, -2.0], [-0.5, -0.5, -math.inf]], np.float32),
        np.array([3, 1], np.int32),
    )


def test_of_a_chat(positions, token_bytes):
    first, second = chat_logprobs(positions, TokenNames(token_bytes)).content
    assert (first.token, first.logprob, first.bytes) == ("a", -3.0, [97])
    assert [each.token for each in first.top_logprobs] == ["b", "c"]
    assert second.top_logprobs[1].logprob == LOWEST_LOGPROB
    json.loads(first.to_json())


def test_tokens_may_be_named_by_id(positions, token_bytes):
    first, _ = chat_logprobs(positions, TokenNames(token_bytes, as_ids=True)).content
    assert first.token == f"token_id:{positions.token_ids[0, 0]}"
    assert first.bytes == [97]


def test_of_a_completion_in_parts(positions, token_bytes):
    names = TokenNames(token_bytes)
    whole = CompletionLogprobsWriter(names).write(positions)
    writer = CompletionLogprobsWriter(names)
    assert concatenate([writer.write(positions[:1]), writer.write(positions[1:])]) == whole
    assert whole.tokens == ["a", "b"]
    assert whole.text_offset == [0, 1]
    assert whole.top_logprobs[0] == {"b": -1.0, "c": -2.0, "a": -3.0}
    assert whole.token_logprobs == [-3.0, -0.5]


def test_a_first_token_of_a_prompt_has_none(positions, token_bytes):
    writer = CompletionLogprobsWriter(TokenNames(token_bytes))
    first = writer.skip([int(positions.token_ids[0, 0])])
    whole = concatenate([first, writer.write(positions)])
    assert (whole.token_logprobs[0], whole.top_logprobs[0]) == (None, None)
    assert whole.text_offset == [0, 1, 2]


def test_of_a_prompt_in_vllms_format(positions, token_bytes):
    first, second, third = prompt_logprobs(positions, TokenNames(token_bytes))
    assert first is None
    a, b, c = (str(each) for each in positions.token_ids[0])
    assert {token: entry.rank for token, entry in second.items()} == {a: 3, b: 1, c: 2}
    assert {token: entry.rank for token, entry in third.items()} == {b: 1, c: 2}
    assert second[a].decoded_token == "a"


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_count_the_characters_of_the_text(tokenizer, token_bytes, as_ids):
    text = "aé🤯b你c"
    ids = tokenizer.encode(text, add_special_tokens=False)
    zeros = np.zeros((len(ids), 1), np.float32)
    written = CompletionLogprobsWriter(TokenNames(token_bytes, as_ids)).write(
        Logprobs(np.array(ids, np.int32)[:, None], zeros, np.ones(len(ids), np.int32))
    )
    assert len(ids) > len(text)  # some characters are of several tokens
    raw = token_bytes.of(ids)
    complete = [b"".join(raw[:index]).decode(errors="ignore") for index in range(len(ids))]
    assert written.text_offset == [len(each) for each in complete]
