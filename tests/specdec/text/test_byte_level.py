from specdec.text.byte_level import bytes_of_token, token_of_bytes


def test_the_bytes_of_a_byte_level_token() -> None:
    assert bytes_of_token("\u0120na\u00c3\u00af\u0100\u00ff") == b" na\xc3\xaf\x00\xff"
    for other in ("a b", "\u00ad", "\u2581a", "\U0001f92f"):  # of no byte: their own text
        assert bytes_of_token(other) == other.encode()


def test_each_byte_has_its_character() -> None:
    content = bytes(range(256))
    assert bytes_of_token(token_of_bytes(content)) == content
    assert len(set(token_of_bytes(content))) == 256
