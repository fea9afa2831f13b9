"""Bytes of tokens of byte-level and SentencePiece vocabularies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import VocabBytes, split_text
from specdec.types.errors import UnsupportedModelError
from tests.specdec.tiny import TEXT
from tests.specdec.trained import byte_level, sentencepiece

SAMPLES = ["the river", "  two spaces\n\n", "日本 and ñandú", "\ttab 1987!", "\N{SNOWMAN}"]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    def vocabulary(name, tokenizer):
        directory = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(directory)
        return VocabBytes(Tokenizer(directory))

    return {
        "byte-level": vocabulary("byte", byte_level(TEXT, 400)),
        "sentencepiece": vocabulary("piece", sentencepiece(TEXT, 420)),
    }


@pytest.fixture(params=["byte-level", "sentencepiece"])
def vocabulary(vocabularies, request):
    return vocabularies[request.param]


@pytest.mark.parametrize("text", SAMPLES)
def test_joined_tokens_are_the_joined_text(vocabulary, text):
    assert vocabulary.text(vocabulary.encode_inside(text)) == text.encode()
    space = " " if vocabulary.adds_space else ""
    assert vocabulary.text(vocabulary.encode_first(text)) == (space + text).encode()


@given(data=st.binary(max_size=12))
def test_any_bytes_have_tokens(vocabularies, data):
    for vocabulary in vocabularies.values():
        assert vocabulary.text(vocabulary.encode_bytes(data)) == data


@given(data=st.binary(max_size=12), text=st.text(max_size=6))
def test_split_text_keeps_all_bytes_and_an_incomplete_character(data, text):
    data = text.encode() + data
    pieces, rest = split_text(data)
    joined = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    assert b"".join(joined) + rest == data
    assert len(rest) < 4
    assert pieces[:1] == [text] or not text or pieces[0].startswith(text)


def test_the_prefix_tokens_are_known(vocabularies):
    assert vocabularies["byte-level"].prefix == ()
    assert vocabularies["byte-level"].adds_space is False
    assert len(vocabularies["sentencepiece"].prefix) == 1
    assert vocabularies["sentencepiece"].adds_space is True


def test_a_character_is_preferred_to_byte_fallback(vocabularies):
    piece = vocabularies["sentencepiece"]
    letter, byte = piece.ids_by_text()[b"e"], piece.encode_bytes(b"\xf0")[0]
    assert letter not in piece.fallback_ids
    assert byte in piece.fallback_ids
    assert piece.ids_by_text()[b"\xf0"] == byte


def test_special_and_unknown_ids_are_not_text(vocabularies):
    for vocabulary in vocabularies.values():
        assert not any(vocabulary.is_text(token) for token in vocabulary.special_ids)
        assert not vocabulary.is_text(10**6)
        assert vocabulary.text([10**6]) == b""


def test_another_kind_of_tokenizer_is_rejected(tmp_path):
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 2}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="byte-level or SentencePiece"):
        VocabBytes(Tokenizer(tmp_path))
