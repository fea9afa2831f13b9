"""Tests of incremental re-encoding: text that grows in pieces encodes as the whole text does."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.speculation.proposers.cross_vocab.retokenizer import Retokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import VocabBytes
from tests.specdec.tiny import TEXT
from tests.specdec.trained import byte_level, sentencepiece

WORDS = sorted(set(TEXT.split()))


@pytest.fixture(scope="module")
def spellings(tmp_path_factory):
    found = []
    for name, tokenizer in (("byte", byte_level(TEXT, 400)), ("piece", sentencepiece(TEXT, 420))):
        directory = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(directory)
        found.append(VocabBytes(Tokenizer(directory)))
    return found


def written(spelling, text):
    """Return the text as bytes, without the prefix that the tokenizer adds."""
    tokens = text.token_ids[len(spelling.prefix) :]
    joined = spelling.text(tokens)
    return joined.removeprefix(b" ") if spelling.adds_space else joined


def extended(spelling, pieces):
    """Return the text after all pieces; check the settled and kept tokens after each."""
    text = Retokenizer(spelling)
    for piece in pieces:
        old, num_settled = list(text.token_ids), text.num_settled
        text.extend(piece)
        assert num_settled <= text.num_settled <= len(text.token_ids)
        assert text.num_kept >= num_settled
        assert text.token_ids[: text.num_kept] == old[: text.num_kept]
    return text


def cut(data, sizes):
    """Cut data into pieces, cycling through the sizes."""
    pieces, index = [], 0
    while data:
        size = sizes[index % len(sizes)]
        pieces.append(data[:size])
        data, index = data[size:], index + 1
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=60),
    ends=st.sampled_from([" ", "\n", "  ", ", ", " \N{SNOWMAN} ", "日本"]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_pieces_encode_as_the_whole_text_does(spellings, words, ends, sizes):
    whole = ends.join(words)
    for spelling in spellings:
        text = extended(spelling, cut(whole.encode(), sizes))
        assert written(spelling, text) == whole.encode()
        assert text.token_ids == [*spelling.prefix, *spelling.encode_first(whole)]


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=20).map(str.encode))))
@example(pieces=["\u2581".encode()])
@example(pieces=[b"\xe2", b"\x96\x81a"])
def test_any_bytes_in_any_pieces_decode_to_the_same_bytes(spellings, pieces):
    for spelling in spellings:
        text = extended(spelling, pieces)
        both = [written(spelling, text), b"".join(pieces)]
        if spelling.adds_space:  # encodes a space as U+2581, so both decode to a space
            both = [each.replace("\u2581".encode(), b" ") for each in both]
        # A leading space that the tokenizer adds cannot be distinguished from one of the text.
        found, whole = (each.lstrip(b" ") for each in both)
        assert found == whole


def test_a_partial_character_is_encoded_at_once_and_completed_later(spellings):
    for spelling in spellings:
        text = Retokenizer(spelling)
        snowman = "\N{SNOWMAN}".encode()
        text.extend(b"the " + snowman[:2])
        assert written(spelling, text) == b"the " + snowman[:2]
        text.extend(snowman[2:] + b" melts")
        assert text.token_ids == [*spelling.prefix, *spelling.encode_first("the \N{SNOWMAN} melts")]


def test_the_part_that_is_encoded_again_stays_short(spellings):
    for spelling in spellings:
        text = Retokenizer(spelling)
        for word in WORDS * 4:
            text.extend(f" {word}".encode())
            assert len(text.token_ids) - text.num_settled <= 40


def test_a_word_that_continues_replaces_its_tokens(spellings):
    byte = spellings[0]
    text = Retokenizer(byte)
    text.extend(b"the wat")
    before = list(text.token_ids)
    text.extend(b"er")
    assert text.num_kept < len(before)
    assert text.token_ids == byte.encode_first("the water")
