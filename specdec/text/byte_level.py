"""GPT-2's way to write the bytes of a token as characters, which byte-level vocabularies use."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable bytes are themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_NO_LATIN1 = "\u0100"
_LATIN1 = str.maketrans(
    {chr(code): _NO_LATIN1 for code in range(256)}
    | {char: chr(byte) for char, byte in _alphabet().items()}
)
"""Characters of tokens to the ones whose codes are their bytes."""

_CHARACTERS = str.maketrans({chr(byte): char for char, byte in _alphabet().items()})


def bytes_of_token(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with other characters is its own text."""
    try:
        return token.translate(_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def token_of_bytes(content: bytes) -> str:
    """Return the byte-level token of some bytes."""
    return content.decode("latin-1").translate(_CHARACTERS)
