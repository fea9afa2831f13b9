"""Division of text by the tokens that complete it, and the decoders that find it."""

from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specdec.text.detokenizer import ByteDecoder, IncrementalDetokenizer, WindowDecoder
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import TokenBytes
from tests.specdec.text.test_detokenizer import PIECES, llama2_ids, spelled


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.fixture(scope="session")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token of each byte; some bytes are written as other characters."""
    backend = tokenizer._backend
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = (b for b in range(256) if b not in kept)
    letters = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}
    return [backend.token_to_id(letters[b]) for b in range(256)]


@settings(max_examples=250, deadline=None)
@given(PIECES)
def test_byte_and_window_decoders_are_equal(
    tokenizer: Tokenizer, byte_ids: list[int], pieces: list[int | bytes]
) -> None:
    token_ids = spelled(pieces, byte_ids)
    for decoder in (ByteDecoder(tokenizer), WindowDecoder(tokenizer)):
        text = "".join(map(decoder.add, token_ids)) + decoder.finish()
        assert text == tokenizer.decode(token_ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 260), max_size=30))
def test_the_end_of_a_window_is_known_without_the_tokenizer(
    llama2_like: Tokenizer, token_ids: list[int]
) -> None:
    """An error of the tokenizer there would reach the engine's thread."""
    decoder = WindowDecoder(llama2_like)
    for token_id in token_ids:
        decoder.add(token_id)
        rest = decoder._decode()[decoder._num_shown :]
        with patch.object(Tokenizer, "decode", side_effect=ValueError("broken")):
            assert decoder.finish() == rest


def test_a_text_whose_last_token_cannot_be_decoded_ends(llama2_like: Tokenizer) -> None:
    decoder = WindowDecoder(llama2_like)
    assert decoder.finish() == ""
    [first_byte] = llama2_ids(llama2_like, b"\xc3")
    decoder.add(first_byte)
    assert decoder.finish() == "\ufffd"
    with patch.object(Tokenizer, "decode", side_effect=ValueError("broken")):
        with pytest.raises(ValueError, match="broken"):
            decoder.add(first_byte)
        assert decoder.finish() == ""


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("<tool>", "<tool>"),
        ("two words", "two words"),  # a space is no letter of a byte-level vocabulary
        ("日本", "日本"),
        ("für", "f\ufffdr"),  # here each letter is one, and stands for a byte
    ],
)
def test_added_tokens_are_decoded_as_in_tokenizers(
    tiny_model_dir: Path, tmp_path: Path, token: str, text: str
) -> None:
    files = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    files.add_tokens([token])
    files.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.append(token_id)
    assert detokenizer.flush() == tokenizer.decode([token_id]) == text
    [shown_alone] = TokenBytes(tokenizer).of([token_id])
    assert shown_alone.decode(errors="replace") == text


def test_text_is_divided_by_the_tokens_after_which_it_is_final(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    [the] = tokenizer.encode("the", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, ("ab",))
    cafe = [byte_ids[b] for b in "é".encode()]
    for token_id in (the, *cafe, byte_ids[ord("a")]):
        detokenizer.append(token_id)
    assert (detokenizer.take(), detokenizer.lengths) == ("theé", (3, 0, 1, 0))
    detokenizer.append(the)
    assert (detokenizer.take(), detokenizer.lengths) == ("athe", (4,)), "with the held back a"
    detokenizer.append(byte_ids[ord("a")])
    assert detokenizer.append(byte_ids[ord("b")]) == "ab"
    assert (detokenizer.flush(), detokenizer.lengths) == ("", (0, 0))


def test_an_incomplete_character_belongs_to_the_last_token(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    for byte in "é".encode()[:1] + b"x" + "é".encode()[:1]:
        detokenizer.append(byte_ids[byte])
    assert (detokenizer.flush(), detokenizer.lengths) == ("\ufffdx\ufffd", (0, 2, 1))


@pytest.mark.parametrize("skips_special_tokens", [False, True])
def test_tokens_that_are_added_together_are_those_that_are_added_one_by_one(
    tokenizer, byte_ids, skips_special_tokens
):
    tokens = [*tokenizer.encode("a café"), 0, 1, byte_ids[0xC3], byte_ids[0xA9], 10**6]
    one_by_one, together = (
        IncrementalDetokenizer(tokenizer, skip_special_tokens=skips_special_tokens)
        for _ in range(2)
    )
    for end in (3, 5, len(tokens)):
        start = {3: 0, 5: 3, len(tokens): 5}[end]
        for token_id in tokens[start:end]:
            one_by_one.append(token_id)
        together.extend(tokens[start:end])
        assert (together.take(), together.lengths) == (one_by_one.take(), one_by_one.lengths)
    assert together.flush() == one_by_one.flush()
