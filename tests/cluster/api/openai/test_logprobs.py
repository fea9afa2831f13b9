"""Log-probabilities in the formats of the API."""

import json
import math
from dataclasses import replace

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
from specdec.text.detokenizer import IncrementalDetokenizer
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


def test_given_tokens_are_in_a_chat_and_not_in_a_prompt(positions, token_bytes):
    """The own token is listed first, and once."""
    given, names = replace(positions, num_given=2), TokenNames(token_bytes)
    first, second = chat_logprobs(given, names).content
    assert [each.token for each in first.top_logprobs] == ["a", "b", "c"]
    assert [each.token for each in second.top_logprobs] == ["b", "c"]
    own = str(positions.token_ids[0, 0])
    assert list(prompt_logprobs(given, names)[1]) == [own]


def test_tokens_may_be_named_by_id(positions, token_bytes):
    first, _ = chat_logprobs(positions, TokenNames(token_bytes, as_ids=True)).content
    assert first.token == f"token_id:{positions.token_ids[0, 0]}"
    assert first.bytes == [97]


def writer_of(tokenizer, as_ids=False, before=()):
    detokenizer = IncrementalDetokenizer(tokenizer, before=before)
    return CompletionLogprobsWriter(TokenNames(TokenBytes(tokenizer), as_ids), detokenizer)


def test_of_a_completion_in_parts(positions, tokenizer):
    whole = writer_of(tokenizer).write(positions)
    writer = writer_of(tokenizer)
    assert concatenate([writer.write(positions[:1]), writer.write(positions[1:])]) == whole
    assert whole.tokens == ["a", "b"]
    assert whole.text_offset == [0, 1]
    assert whole.top_logprobs[0] == {"b": -1.0, "c": -2.0, "a": -3.0}
    assert whole.token_logprobs == [-3.0, -0.5]


def test_a_first_token_of_a_prompt_has_none(positions, tokenizer):
    writer = writer_of(tokenizer)
    first = writer.skip([int(positions.token_ids[0, 0])])
    whole = concatenate([first, writer.write(positions)])
    assert (whole.token_logprobs[0], whole.top_logprobs[0]) == (None, None)
    assert whole.text_offset == [0, 1, 2]


def test_offsets_of_an_echo_are_those_of_its_text(positions, tokenizer):
    """The tokenizer may put a token before a text, which has no character there."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    writer = CompletionLogprobsWriter(TokenNames(TokenBytes(tokenizer)), detokenizer, (0, 5, 2))
    parts = [writer.skip([1]), writer.write(positions), writer.write(positions)]
    assert concatenate(parts).text_offset == [0, 0, 5, 7, 8]


def test_of_a_prompt_in_vllms_format(positions, token_bytes):
    first, second, third = prompt_logprobs(positions, TokenNames(token_bytes))
    assert first is None
    a, b, c = (str(each) for each in positions.token_ids[0])
    assert {token: entry.rank for token, entry in second.items()} == {a: 3, b: 1, c: 2}
    assert {token: entry.rank for token, entry in third.items()} == {b: 1, c: 2}
    assert second[a].decoded_token == "a"


def logprobs_of(ids):
    zeros = np.zeros((len(ids), 1), np.float32)
    return Logprobs(np.array(ids, np.int32)[:, None], zeros, np.ones(len(ids), np.int32))


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_count_the_characters_of_the_text(tokenizer, token_bytes, as_ids):
    text = "aé🤯b你c"
    ids = tokenizer.encode(text, add_special_tokens=False)
    written = writer_of(tokenizer, as_ids).write(logprobs_of(ids))
    assert len(ids) > len(text)  # some characters are of several tokens
    raw = token_bytes.of(ids)
    complete = [b"".join(raw[:index]).decode(errors="ignore") for index in range(len(ids))]
    assert written.text_offset == [len(each) for each in complete]


@pytest.mark.parametrize(("num_before", "expected"), [(0, [0, 3, 9]), (1, [0, 6, 7])])
def test_offsets_count_the_space_after_a_prompt(llama2_like, num_before, expected):
    ids = [llama2_like.token_id(each) for each in ("▁the", "▁river", "s", "▁the")]
    before, ids = ids[:num_before], ids[num_before : num_before + 3]
    written = writer_of(llama2_like, before=before).write(logprobs_of(ids))
    assert written.tokens == [[" the", " river", "s"], [" river", "s", " the"]][num_before]
    assert written.text_offset == expected


def test_offsets_skip_tokens_that_are_not_in_the_text(tokenizer):
    ids = [1, *tokenizer.encode("ab", add_special_tokens=False), 2]
    writer = writer_of(tokenizer)
    parts = [writer.skip(ids[:1]), writer.write(logprobs_of(ids[1:]))]
    assert concatenate(parts).text_offset == [0, 0, 1, 2][: len(ids)]
