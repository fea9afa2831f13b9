import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.gumbel import Key, Words, key_of, philox4x32

word = st.integers(0, 2**32 - 1)


def call(counter: list[int], key: list[int]) -> list[int]:
    words = philox4x32(
        Words(*(torch.tensor([value]) for value in counter)),
        Key(*(torch.tensor([value]) for value in key)),
    )
    return [int(value) for value in words]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


# kat_vectors of the Random123 distribution: zeros, ones, and the digits of pi.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            [0, 0, 0, 0],
            [0, 0],
            [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        ),
        (
            [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF],
            [0xFFFFFFFF, 0xFFFFFFFF],
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert call(counter, key) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(word, min_size=4, max_size=4), st.lists(word, min_size=2, max_size=2))
def test_equals_plain_integers(counter, key):
    assert call(counter, key) == plain_philox(counter, key)


@pytest.mark.parametrize("num_counters", [1, 3, 7])
def test_shared_words_broadcast(num_counters):
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 2**32, (num_counters, 5), generator=generator)
    shared = torch.randint(0, 2**32, (5, 5), generator=generator)  # [words, keys]
    whole = shared.unsqueeze(1).expand(5, num_counters, 5).contiguous()
    broadcast = philox4x32(Words(first, *shared[:3]), Key(*shared[3:]))
    expected = philox4x32(Words(first, *whole[:3]), Key(*whole[3:]))
    assert all(torch.equal(a, b) for a, b in zip(broadcast, expected, strict=True))


def test_key_is_both_halves_of_the_seed():
    low, high = key_of(torch.tensor([2**63 - 1, 5, 7 << 32]))
    assert low.tolist() == [2**32 - 1, 5, 0]
    assert high.tolist() == [2**31 - 1, 0, 7]
