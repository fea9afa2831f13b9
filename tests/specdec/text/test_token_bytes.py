from pathlib import Path

import pytest

from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import TokenBytes, VocabBytes
from specdec.types.errors import UnsupportedModelError

TEXT = "The river: naïve 🤯 你好"


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


def test_joined_bytes_are_the_text(tokenizer):
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = TokenBytes(tokenizer).of(token_ids)
    assert len(parts) == len(token_ids)
    assert b"".join(parts).decode() == TEXT


def test_a_special_token_is_its_name_and_an_unknown_id_is_empty(tokenizer):
    assert TokenBytes(tokenizer).of([0, 99_999]) == [b"<|endoftext|>", b""]


def test_a_vocabulary_of_another_kind_is_decoded_token_by_token(tokenizer, monkeypatch):
    def refuse(*_):
        raise UnsupportedModelError("neither")

    monkeypatch.setattr("specdec.text.vocab_bytes.token_reader", refuse)
    token_ids = tokenizer.encode("The river", add_special_tokens=False)
    assert b"".join(TokenBytes(tokenizer).of(token_ids)) == b"The river"


@pytest.mark.parametrize("name", ["tokenizer", "llama2_like"])
def test_each_token_has_the_bytes_of_the_whole_vocabulary(name, request):
    tokenizer = request.getfixturevalue(name)
    every = range(tokenizer.vocab_size)
    vocabulary = VocabBytes(tokenizer)
    assert TokenBytes(tokenizer).of(every) == [vocabulary.text((each,)) for each in every]
