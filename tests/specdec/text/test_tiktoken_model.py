import base64
import json
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from specdec.text import tiktoken_model
from specdec.text.tokenizer import Tokenizer, check_tokenizer
from specdec.types.errors import UnsupportedModelError
from specdec.types.request import Conversation

WORDS = [
    "ab",
    "cab",
    "北京市",
    "naïve",
    "don't",
    "ABC",
    "2003",
    "\n\n",
    "  ",
    " ",
    "x_y",
    "é",
    "!?",
]
ADDED = {"[BOS]": True, "[EOS]": True, "<think>": False}


def random_ranks(seed: int, size: int = 200) -> list[bytes]:
    """Return all bytes, then random tokens in random order, some of which no merge makes."""
    rng = random.Random(seed)
    pieces = ["a", "b", "c", "ab", "北", "京", "\n", " a", "2", "0", "é", "A"]
    longer = {"".join(rng.choices(pieces, k=rng.randint(2, 4))).encode() for _ in range(size)}
    return [bytes([byte]) for byte in range(256)] + sorted(longer, key=lambda _: rng.random())


def write(directory: Path, ranks: list[bytes], **settings: Any) -> Path:
    lines = (b"%s %d\n" % (base64.b64encode(each), rank) for rank, each in enumerate(ranks))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        len(ranks) + 2 * place: {"content": content, "special": special}
        for place, (content, special) in enumerate(ADDED.items())
    }
    published = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for each in messages %}{{ each.content }}[EOS]{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(published | settings))
    (directory / "config.json").write_text('{"model_type": "kimi_k2"}')
    return directory


def by_tiktoken(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Encode as tiktoken does: merge the pair whose result has the lowest rank."""
    found = []
    for piece in regex.findall("(?V1)" + tiktoken_model._PATTERN, text):
        content = piece.encode()
        parts = [content] if content in ranks else [bytes([byte]) for byte in content]
        while True:
            pairs = [left + right for left, right in pairwise(parts)]
            made = [ranks[each] for each in pairs if each in ranks]
            if not made:
                break
            place = next(i for i, each in enumerate(pairs) if ranks.get(each) == min(made))
            parts[place : place + 2] = [pairs[place]]
        found += [ranks[each] for each in parts]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_texts_are_encoded_as_by_tiktoken(tmp_path: Path, seed: int) -> None:
    ranks = random_ranks(seed)
    tokenizer = Tokenizer(write(tmp_path, ranks))
    numbered = {content: rank for rank, content in enumerate(ranks)}
    rng = random.Random(seed)
    for _ in range(100):
        text = "".join(rng.choices([*WORDS, "a", "b", "c", "cabbac"], k=rng.randint(1, 12)))
        assert tokenizer.encode(text) == by_tiktoken(text, numbered), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_han_is_split_from_letters(tmp_path: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + ["文E".encode(), "中文".encode()]
    tokens = Tokenizer(write(tmp_path, ranks)).encode("中文English")
    assert tokens[0] == 257
    assert 256 not in tokens


def test_the_tokens_and_the_template_of_the_configuration_are_read(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    template = "{{ tools }}"
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}[EOS]")
    tokenizer = Tokenizer(write(tmp_path, random_ranks(0)))
    size = len(random_ranks(0))
    text = f"<think>[EOS]<|reserved_token_{size + 1}|>"
    assert tokenizer.encode(text) == [size + 4, size + 2, size + 1]
    assert tokenizer.decode([size, size + 4, size + 2]) == "<think>"
    assert (tokenizer.end_token_id, tokenizer.vocab_size) == (size + 2, size + 5)
    assert tokenizer.is_byte_level
    assert tokenizer.chat_template.plain_text == "{{ messages[0].content }}[EOS]"
    assert tokenizer.chat_template.takes_tools


TOOL = {"type": "function", "function": {"name": "f", "enum": [{"b": 1, "a": 2}, "z", "c"]}}
SORTED = {"function": {"enum": [{"a": 2, "b": 1}, "z", "c"], "name": "f"}, "type": "function"}
BY_CLASS = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


@pytest.mark.parametrize(("auto_map", "expected"), [(BY_CLASS, SORTED), ({}, TOOL)])
@pytest.mark.parametrize("is_saved", [False, True])
def test_keys_of_tools_are_sorted_as_by_the_class_of_kimi(
    tmp_path: Path, auto_map: object, expected: object, is_saved: bool
) -> None:
    write(tmp_path, random_ranks(0), chat_template="{{ tools | tojson }}", auto_map=auto_map)
    if is_saved:
        (tmp_path / "tokenizer.json").write_text(Tokenizer(tmp_path).to_json())
    tokenizer = pickle.loads(pickle.dumps(Tokenizer(tmp_path)))
    conversation = Conversation(({"role": "user", "content": "Hi"},), tools=(TOOL,))
    assert tokenizer.render(conversation).text == json.dumps([expected])


@pytest.mark.parametrize("load", [Tokenizer, check_tokenizer])
def test_ranks_without_a_known_pattern_are_rejected(tmp_path: Path, load: Any) -> None:
    write(tmp_path, random_ranks(0), tokenizer_class="HYTokenizer")
    with pytest.raises(UnsupportedModelError, match=r"tiktoken\.model has no pattern to split"):
        load(tmp_path)
    (tmp_path / "tiktoken.model").rename(tmp_path / "hy.tiktoken")
    with pytest.raises(UnsupportedModelError, match=r"hy\.tiktoken has no pattern to split"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({0: "[A]", 1: "[A]"}, r"'\[A\]' in tokenizer_config\.json is 457; .* \(found: 456\)"),
        ({0: "ab", 1: "[EOS]"}, r"'ab' in .* is 456; .* the only id of this text \(found: 256\)"),
        ({-1: "[EOS]"}, r"'\[EOS\]' in .* is 455; .* \(found: 456\)"),
        ({-457: "[EOS]"}, r"'\[EOS\]' in .* is -1; it must be from 0 to 16839"),
        ({0: ""}, r"'' in .* is 456; .* \(found: None\)"),
        ({0: "<|reserved_token_457|>", 2: "[EOS]"}, r"is 457; .* \(found: 456\)"),
        ({10**9: "[EOS]"}, r"'\[EOS\]' in .* is 1000000456; it must be from 0 to 16839"),
    ],
)
def test_added_tokens_with_other_ids_are_rejected(
    tmp_path: Path, added: dict[int, str], message: str
) -> None:
    ranks = [*random_ranks(0, size=0), b"ab", *(b"%04d" % number for number in range(199))]
    tokens = {len(ranks) + place: {"content": content} for place, content in added.items()}
    write(tmp_path, ranks, added_tokens_decoder=tokens)
    with pytest.raises(UnsupportedModelError, match=message):
        Tokenizer(tmp_path)


def test_added_tokens_among_the_ranks_are_recognized(tmp_path: Path) -> None:
    ranks = [*random_ranks(0, size=0), b"[EOS]"]
    write(tmp_path, ranks, added_tokens_decoder={256: {"content": "[EOS]"}}, bos_token=None)
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.encode("a[EOS]"), tokenizer.special_token_ids) == ([97, 256], {256})


def test_all_reserved_tokens_are_added(tmp_path: Path) -> None:
    num_ranks, last = 256, 256 + tiktoken_model._MAX_ADDED - 1
    tokens = {last: {"content": "[EOS]"}}
    write(tmp_path, random_ranks(0, size=0), added_tokens_decoder=tokens, bos_token=None)
    with tiktoken_model.with_tokenizer_json(tmp_path) as directory:
        found = json.loads((directory / "tokenizer.json").read_bytes())["added_tokens"]
    assert [each["id"] for each in found] == [*range(num_ranks, last + 1)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (random_ranks(0, size=0)[1:], "no token for the byte 0"),
        ([*random_ranks(0, size=0), b"a" * 1025], "a token of 1025 bytes; .* at most 1024"),
    ],
)
def test_ranks_without_all_bytes_or_with_long_tokens_are_rejected(
    tmp_path: Path, ranks: list[bytes], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Tokenizer(write(tmp_path, ranks))


@pytest.mark.parametrize("content", [b"YQ== 0\nYg== 2", b"YQ==", b"YQ== a", b"! 0"])
def test_a_malformed_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, random_ranks(0))
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="cannot load a tokenizer"):
        Tokenizer(tmp_path)
