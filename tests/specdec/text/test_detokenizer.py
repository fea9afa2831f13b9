import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer

EMOJI = "🤯👨‍👩‍👧"  # the second is one sign of five characters


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


def expected_text(
    text: str, stop: tuple[str, ...], *, begin: int = 0, includes_stop: bool = False
) -> tuple[str, str | None]:
    """Return the text up to the first stop string, and that stop string: the slow reference.

    begin: how many characters a stop string must reach beyond.
    """
    for end in range(begin + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if includes_stop else end - len(longest)], longest
    return text, None


def detokenize(
    tokenizer: Tokenizer,
    token_ids: list[int],
    stop: tuple[str, ...],
    rng: random.Random,
    *,
    includes_stop: bool = False,
    min_tokens: int = 0,
    before: Sequence[int] = (),
) -> tuple[str, str | None]:
    """Append all tokens, and call `take` at random moments; check how its text is divided."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop, includes_stop=includes_stop, min_tokens=min_tokens, before=before
    )
    parts, stopped, num_new = [], None, 0
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        num_new += 1
        if rng.random() < 0.5:
            parts.append(detokenizer.take())
            check_lengths(detokenizer, parts[-1], num_new)
            num_new = 0
        if stopped is not None:
            break
    if stopped is None:
        detokenizer.skip()  # as a token that ends the text
        num_new += 1
    rest = detokenizer.flush()
    if num_new > 0:
        check_lengths(detokenizer, rest, num_new)
    return "".join(parts) + rest, stopped


def check_lengths(detokenizer: IncrementalDetokenizer, text: str, num_tokens: int) -> None:
    assert len(detokenizer.lengths) == num_tokens
    assert sum(detokenizer.lengths) == len(text)
    assert min(detokenizer.lengths) >= 0


BYTES = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=6).map(str.encode),
    st.sampled_from([EMOJI.encode(), "\ufffd".encode() * 12, b"\xf0\x9f\x98", b"\x80" * 20]),
)
# `r` picks any token, a byte string spells itself out byte by byte.
PIECES = st.lists(st.one_of(st.integers(0, 400), BYTES), max_size=24)


def spelled(pieces: list[int | bytes], byte_ids: list[int]) -> list[int]:
    """Return the tokens of PIECES."""
    return [
        token_id
        for piece in pieces
        for token_id in ([piece] if isinstance(piece, int) else [byte_ids[b] for b in piece])
    ]


STOPS = st.lists(
    st.one_of(
        st.text("aeir t\n", min_size=1, max_size=3),
        st.sampled_from(
            ["🤯", "👨\u200d", "the river", "aab", "aaab", "\ufffd", "\ufffd\ufffd", "é"]
        ),
    ),
    max_size=4,
).map(tuple)


@settings(max_examples=250, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.randoms(use_true_random=False))
def test_joined_text_is_the_decoded_text(
    tokenizer: Tokenizer,
    byte_ids: list[int],
    pieces: list[int | bytes],
    stop: tuple[str, ...],
    includes_stop: bool,
    rng: random.Random,
) -> None:
    token_ids = spelled(pieces, byte_ids)
    text, stopped = detokenize(tokenizer, token_ids, stop, rng, includes_stop=includes_stop)
    expected, expected_stop = expected_text(
        tokenizer.decode(token_ids), stop, includes_stop=includes_stop
    )
    assert text == expected
    assert stopped in (None, expected_stop)


# Complete characters only: the reference does not define to which token a character belongs that is
# split over two.
WORDS = st.lists(
    st.sampled_from(["a", "aa", "aab", "the", " river", "\n", "e", " ", "it"]), max_size=24
)


@settings(max_examples=150, deadline=None)
@given(WORDS, STOPS, st.integers(0, 12), st.booleans(), st.randoms(use_true_random=False))
def test_stop_strings_within_min_tokens_are_ignored(
    tokenizer: Tokenizer,
    words: list[str],
    stop: tuple[str, ...],
    min_tokens: int,
    includes_stop: bool,
    rng: random.Random,
) -> None:
    token_ids = [token_id for word in words for token_id in tokenizer.encode(word)]
    options = {"includes_stop": includes_stop}
    found = detokenize(tokenizer, token_ids, stop, rng, min_tokens=min_tokens, **options)
    passed_over = len(tokenizer.decode(token_ids[:min_tokens]))
    whole = tokenizer.decode(token_ids)
    assert found == expected_text(whole, stop, begin=passed_over, **options)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60), st.randoms(use_true_random=False))
def test_any_bytes(
    tokenizer: Tokenizer, byte_ids: list[int], data: list[int], rng: random.Random
) -> None:
    token_ids = [byte_ids[b] for b in data]
    text, _ = detokenize(tokenizer, token_ids, (), rng)
    assert text == bytes(data).decode(errors="replace")


def test_characters_are_returned_as_soon_as_complete(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    seen = []
    for byte in ("a" + EMOJI).encode():
        assert not detokenizer.append(byte_ids[byte])
        seen.append(detokenizer.take())
    assert [text for text in seen if text] == list("a" + EMOJI)
    assert detokenizer.flush() == ""


def test_an_incomplete_character_ends_as_a_replacement(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    for byte in "é🤯".encode()[:-1]:
        detokenizer.append(byte_ids[byte])
    assert detokenizer.take() == "é"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_invalid_bytes_are_not_held_back_indefinitely(
    tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(1000):
        detokenizer.append(byte_ids[0x80])
    assert len(detokenizer.take()) == 1000


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=24), st.lists(st.integers(0, 3), max_size=24), st.booleans())
def test_tokens_that_are_decoded_together_have_the_text_of_one_by_one(
    tokenizer: Tokenizer, byte_ids: list[int], data: bytes, sizes: list[int], skips: bool
) -> None:
    """Empty takes and special tokens included."""
    token_ids = [byte_ids[byte] for byte in data] + [*tokenizer.special_token_ids][:1]
    one_by_one, decoding = (
        IncrementalDetokenizer(tokenizer, skip_special_tokens=skips) for _ in range(2)
    )
    for size in [*sizes, len(token_ids)]:
        taken, token_ids = token_ids[:size], token_ids[size:]
        for token_id in taken:
            one_by_one.append(token_id)
        assert decoding.decode(taken) == one_by_one.take()
        assert decoding.lengths == one_by_one.lengths
    assert decoding.flush() == one_by_one.flush()


def test_lengths_depend_on_the_tokens_alone(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    """A step with drafts adds several at once, and a part of a stop string is held back."""

    def lengths(num_at_once: int) -> list[int]:
        decoding, found = IncrementalDetokenizer(tokenizer, ("e ", "hex")), list[int]()
        for index, byte in enumerate(b"the>he", 1):
            assert decoding.append(byte_ids[byte]) is None
            if index % num_at_once == 0:
                decoding.take()
                found += decoding.lengths
        return found

    assert lengths(1) == lengths(2) == lengths(3) == [1, 0, 0, 3, 0, 0]


def test_special_tokens_are_text_only_if_requested(tokenizer: Tokenizer) -> None:
    token_ids = [1, *tokenizer.encode("the town"), 2]
    skipping = IncrementalDetokenizer(tokenizer)
    showing = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    for token_id in token_ids:
        skipping.append(token_id)
        showing.append(token_id)
    assert skipping.flush() == "the town"
    assert showing.flush() == "<|im_start|>the town<|im_end|>"


def feed(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...]
) -> tuple[list[str], IncrementalDetokenizer]:
    """Append `text` by characters, up to a stop string; return the result of each `take`."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    taken = []
    for char in text:
        stopped = any(detokenizer.append(token_id) for token_id in tokenizer.encode(char))
        taken.append(detokenizer.take())
        if stopped:
            break
    return taken, detokenizer


def test_a_possible_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    taken, detokenizer = feed(tokenizer, "xabaabay", ("aabab",))
    assert taken == ["x", "", "ab", "", "", "", "", "aabay"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one, two", (",",), "one"),
        ("abcd", ("cd", "bc"), "a"),  # the one that ends first
        ("abcd", ("c", "abc", "bc"), ""),  # of those that end together, the longest
        ("aaab", ("aab",), "a"),
        ("x🤯y", ("🤯",), "x"),
        ("abc", ("bcd",), "abc"),
        ("stop", ("stop",), ""),
    ],
)
def test_text_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], expected: str
) -> None:
    taken, detokenizer = feed(tokenizer, text, stop)
    assert "".join(taken) + detokenizer.flush() == expected


@pytest.mark.parametrize(("includes_stop", "expected"), [(False, " r"), (True, " riv")])
def test_a_token_may_contain_the_stop_string_and_more(
    tokenizer: Tokenizer, includes_stop: bool, expected: str
) -> None:
    (token_id,) = tokenizer.encode(" river")
    detokenizer = IncrementalDetokenizer(tokenizer, ("iv",), includes_stop=includes_stop)
    assert detokenizer.append(token_id) == "iv"
    assert detokenizer.take() == expected
    assert detokenizer.flush() == ""


def test_a_stop_string_may_begin_within_min_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, ("ab",), min_tokens=3)
    found = [detokenizer.append(tokenizer.encode(char)[0]) for char in "abab"]
    assert found == [None, None, None, "ab"]
    assert detokenizer.flush() == "ab"


def test_no_token_may_follow_a_stop_string(tokenizer: Tokenizer) -> None:
    _, detokenizer = feed(tokenizer, "a.", (".",))
    with pytest.raises(AssertionError):
        detokenizer.append(50)


def llama2_ids(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    names = [
        name
        for piece in pieces
        for name in ([piece] if isinstance(piece, str) else [f"<0x{b:02X}>" for b in piece])
    ]
    return [tokenizer._backend.token_to_id(name) for name in names]


def test_spaces_and_fallback_bytes(llama2_like: Tokenizer) -> None:
    emoji = (EMOJI * 3).encode()
    token_ids = llama2_ids(llama2_like, "▁the", "▁river", "s", emoji, "▁", "▁the", "é".encode())
    text, _ = detokenize(llama2_like, token_ids, (), random.Random(0))
    assert text == llama2_like.decode(token_ids) == f"the rivers{EMOJI * 3}  theé"


LLAMA2_WORDS = st.lists(st.sampled_from(["▁", "▁the", "▁river", "s", "é".encode()]), min_size=1)


@settings(max_examples=100, deadline=None)
@given(LLAMA2_WORDS, LLAMA2_WORDS, st.randoms(use_true_random=False))
def test_a_text_continues_its_prompt(
    llama2_like: Tokenizer,
    prompt: list[str | bytes],
    output: list[str | bytes],
    rng: random.Random,
) -> None:
    before, token_ids = llama2_ids(llama2_like, *prompt), llama2_ids(llama2_like, *output)
    text, _ = detokenize(llama2_like, token_ids, (), rng, before=before)
    assert llama2_like.decode(before) + text == llama2_like.decode([*before, *token_ids])


def test_stop_strings_begin_with_the_space_after_the_prompt(llama2_like: Tokenizer) -> None:
    before, [river] = llama2_ids(llama2_like, "▁the"), llama2_ids(llama2_like, "▁river")
    assert IncrementalDetokenizer(llama2_like, (" ri",), before=before).append(river) == " ri"


@pytest.mark.parametrize(("skips", "expected"), [(True, "the"), (False, " the")])
def test_a_text_after_a_hidden_token_begins_without_a_space(
    llama2_like: Tokenizer, skips: bool, expected: str
) -> None:
    [unk] = llama2_like.special_token_ids
    before = [*llama2_ids(llama2_like, "▁river"), unk]
    detokenizer = IncrementalDetokenizer(llama2_like, (), skips, before=before)
    detokenizer.append(*llama2_ids(llama2_like, "▁the"))
    assert detokenizer.take() == expected


def test_a_prompt_that_ends_within_a_character_adds_nothing(llama2_like: Tokenizer) -> None:
    before = llama2_ids(llama2_like, "▁the", "é".encode()[:1])
    detokenizer = IncrementalDetokenizer(llama2_like, before=before)
    assert detokenizer.append(*llama2_ids(llama2_like, "▁river")) is None
    assert detokenizer.take() == "river"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 260), max_size=60), st.randoms(use_true_random=False))
@example([1, 1, 1, 1, 33, 129], random.Random(0))
def test_invalid_fallback_bytes_lose_no_text(
    llama2_like: Tokenizer, token_ids: list[int], rng: random.Random
) -> None:
    text, _ = detokenize(llama2_like, token_ids, (), rng)
    # Each time invalid bytes fill the window, or follow a space with which it begins after five
    # tokens, up to two extra U+FFFD may be returned.
    assert len(text) <= len(llama2_like.decode(token_ids)) + 2 * (len(token_ids) // 5)
    shown = iter(text)
    at_once = llama2_like.decode(token_ids).replace("\ufffd", "")
    assert all(char in shown for char in at_once)  # in this order, with others between


@pytest.mark.parametrize("kind", ["text", "broken bytes", "special tokens"])
def test_the_cost_of_a_token_does_not_depend_on_the_text_length(
    llama2_like: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = {
        "text": llama2_ids(llama2_like, *["▁the", "▁river", "s", "▁the", "é".encode()] * 60),
        "broken bytes": llama2_ids(llama2_like, b"\x80" * 400),
        "special tokens": [*llama2_like.special_token_ids] * 400,
    }[kind]
    assert token_ids
    decode, decoded_tokens = Tokenizer.decode, [0]

    def counting_decode(self: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
        decoded_tokens.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting_decode)
    detokenizer = IncrementalDetokenizer(llama2_like, ("zzz",))
    for token_id in token_ids:
        detokenizer.append(token_id)
    assert max(decoded_tokens) <= 14
    assert sum(decoded_tokens) <= 8 * len(token_ids)
    assert (kind == "special tokens") == (sum(decoded_tokens) == 0)
