"""How byte-level vocabularies (GPT-2 and most since) spell text: each byte as one character."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, others follow 255 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _alphabet()


def bytes_of_token(token: str) -> bytes:
    """What a token stands for; one with other characters, as added ones may be, for itself."""
    if not _ALPHABET.keys() >= set(token):
        return token.encode()
    return bytes(_ALPHABET[char] for char in token)
