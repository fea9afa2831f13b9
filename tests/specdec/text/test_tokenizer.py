import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from specdec.text.tokenizer import (
    MAX_RENDERED_CHARS,
    Tokenizer,
    check_token_ids,
    check_tokenizer,
)
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.request import ChatMessage, Conversation
from tests.specdec.tiny import TURN_END, TURN_START, tiny_llama_dir


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.fixture
def own_dir(tmp_path: Path) -> Path:
    return tiny_llama_dir(tmp_path, layers=1)


@pytest.mark.parametrize("text", ["", "The river, 2003.", "naïve 🤯 你好\n\t  x", "\x00"])
def test_decoding_inverts_encoding(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode_long(token_ids) == text
    check_token_ids("token_ids", token_ids, tokenizer.vocab_size)


def test_a_long_text_is_decoded_without_the_gil(tokenizer: Tokenizer) -> None:
    """Another thread runs meanwhile, which the interpreter itself would not switch to."""
    token_ids, may_run, interval = [40] * 20_000, threading.Lock(), sys.getswitchinterval()
    may_run.acquire()
    other = threading.Thread(target=may_run.acquire)
    other.start()
    try:
        sys.setswitchinterval(1000)
        may_run.release()
        texts = [tokenizer.decode_long(token_ids)]
        while other.is_alive() and len(texts) < 200:
            texts.append(tokenizer.decode_long(token_ids))
        assert not other.is_alive()
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert set(texts) == {tokenizer.decode(token_ids)}


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(
    "text", ["", "The river, 2003.", f"{TURN_START}user\nnaïve 🤯 你好{TURN_END}"]
)
def test_encoding_equals_transformers(tokenizer: Tokenizer, text: str, adds: bool) -> None:
    assert tokenizer.encode(text, adds) == tokenizer._backend.encode(text, None, False, adds).ids


def test_a_pickled_tokenizer_is_the_same(tiny_model_dir: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer(tiny_model_dir, template)
    text = f"naïve 🤯{TURN_END}"
    assert tokenizer.whole_texts[60] is not None
    read: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert read.to_json() == tokenizer.to_json()
    assert read.encode(text) == tokenizer.encode(text)
    chat = [ChatMessage("user", text)]
    assert read.chat_template.text == template
    assert read.encode_chat(chat) == tokenizer.encode_chat(chat)
    assert read.end_token_id == tokenizer.end_token_id
    assert not read.whole_texts, "a cache was sent"


def test_the_length_limit_counts_the_rendered_text(tokenizer: Tokenizer) -> None:
    long = Conversation(({"role": "user", "content": "x" * (MAX_RENDERED_CHARS + 1)},))
    with pytest.raises(InvalidValueError) as caught:
        tokenizer.encode_conversation(long)
    assert caught.value.field == "messages length"


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 383
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.blank_token_ids == frozenset()


def test_special_tokens_are_skipped_only_if_requested(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(f"river{TURN_END}")
    assert tokenizer.decode(token_ids) == "river"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == f"river{TURN_END}"


def test_ids_beyond_the_vocabulary_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("river"), 383, 100_000]) == "river"


def test_files_cannot_truncate_a_prompt(own_dir: Path, tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(own_dir / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(own_dir / "tokenizer.json"))
    text = "The river is older than the town."
    assert Tokenizer(own_dir).encode(text) == tokenizer.encode(text)


def test_a_lone_surrogate_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidValueError) as caught:
        tokenizer.encode("ab\ud83d")
    assert caught.value.field == "text"
    assert "character 2" in str(caught.value)


def test_a_chat_prompt_ends_with_the_generation_prompt(tokenizer: Tokenizer) -> None:
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "When?")]
    text = tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)
    assert text == (
        f"{TURN_START}system\nBe brief.{TURN_END}\n{TURN_START}user\nWhen?{TURN_END}\n"
        f"{TURN_START}assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([ChatMessage("user", "a"), ChatMessage("tool", "b")], "messages[1].role"),
        ([ChatMessage("", "a")], "messages[0].role"),
        ([ChatMessage("user", "\udc00")], "messages[0].content"),
    ],
)
def test_malformed_messages_are_rejected(
    tokenizer: Tokenizer, messages: list[ChatMessage], field: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system\nmessages') }}", "raised: no system messages"),
        ("{{ messages[7]['role'] }}", "failed on them"),
        ("{% for %}", "failed on them"),
    ],
)
def test_an_error_of_a_template_is_one_line(own_dir: Path, template: str, reason: str) -> None:
    (own_dir / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidValueError) as caught:
        Tokenizer(own_dir).encode_chat([ChatMessage("user", "a")])
    assert caught.value.field == "messages"
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_chat_template_is_an_error(own_dir: Path) -> None:
    (own_dir / "chat_template.jinja").unlink()
    with pytest.raises(InvalidValueError, match="no chat template"):
        Tokenizer(own_dir).encode_chat([ChatMessage("user", "a")])


def test_a_template_of_a_processor_is_read_where_there_is_no_other(
    own_dir: Path, tokenizer: Tokenizer
) -> None:
    source = "{{ messages[0].content }}{{ eos_token }}"
    (own_dir / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    assert Tokenizer(own_dir).chat_template.text == tokenizer.chat_template.text
    (own_dir / "chat_template.jinja").unlink()
    loaded = Tokenizer(own_dir)
    assert loaded.decode(loaded.encode_chat([ChatMessage("user", "a")]), False) == f"a{TURN_END}"
    for content, fault in (
        ("[]", "is not a JSON"),
        ('{"chat_template": ["a"]}', r"is \['a'\], not"),
    ):
        (own_dir / "chat_template.json").write_text(content)
        with pytest.raises(UnsupportedModelError, match=rf"chat_template\.json {fault}"):
            Tokenizer(own_dir)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_a_directory_without_a_tokenizer_is_rejected(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedModelError, match=r"neither tokenizer\.json nor") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [Tokenizer, check_tokenizer])
@pytest.mark.parametrize(
    ("kind", "file", "reads"),
    [
        ("LlamaTokenizer", "spiece.model", r"LlamaTokenizer reads \(tokenizer\.model\)"),
        ("LlamaTokenizer", "vocab.json", r"LlamaTokenizer reads \(tokenizer\.model\)"),
        ("Qwen2Tokenizer", "vocab.txt", r"Qwen2Tokenizer reads \(merges\.txt, vocab\.json\)"),
        ("GemmaTokenizer", "tokenizer.model.v3", "GemmaTokenizer reads;"),
        ("MBartTokenizer", "vocab.txt", r"MBartTokenizer reads \(sentencepiece\.bpe\.model\)"),
    ],
)
def test_a_vocabulary_that_the_class_does_not_read_is_none(
    own_dir: Path, load: Callable[[Path], object], kind: str, file: str, reads: str
) -> None:
    (own_dir / "tokenizer.json").unlink()
    (own_dir / file).write_text("{}")
    (own_dir / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(UnsupportedModelError, match=reads):
        load(own_dir)


@pytest.mark.parametrize("load", [Tokenizer, check_tokenizer])
def test_a_tokenizer_json_without_a_vocabulary_is_rejected(
    own_dir: Path, load: Callable[[Path], object]
) -> None:
    path = own_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer|its vocabulary is empty"):
        load(own_dir)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", "CohereTokenizer", None])
def test_tokenizer_json_is_read_whole_whatever_class_is_named(
    tiny_model_dir: Path, tmp_path: Path, kind: str | None
) -> None:
    """Classes of transformers replace its normalizer, pre-tokenizer and decoder by their own."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend = Backend.from_file(str(tiny_model_dir / "tokenizer.json"))
    words = pre_tokenizers.Split("river", "merged_with_previous")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, backend.pre_tokenizer])
    backend.normalizer = normalizers.Replace("town", "river")
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Replace("river", "stream")])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": kind, "extra_special_tokens": {"turn_token": TURN_START}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    template = "{{ bos_token }}{{ turn_token }}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)

    loaded, text = Tokenizer(tmp_path), f"The town's\n  1987 e\u0301 townriver{TURN_END}x"
    token_ids = loaded.encode(text)
    assert token_ids == backend.encode(text).ids
    for skips in (True, False):
        assert loaded.decode(token_ids, skips) == backend.decode(token_ids, skips)
    assert loaded.vocab_size == backend.get_vocab_size()
    assert loaded.end_token_id == backend.token_to_id(TURN_END)
    prompt = loaded.encode_chat([ChatMessage("user", "a")])
    assert loaded.decode(prompt, False) == f"{TURN_START}{TURN_START}a"


@pytest.mark.parametrize("end", [[2, 3], 2, -1, 10**9, None])
def test_beginning_and_end_come_from_config_json_where_the_tokenizer_names_none(
    own_dir: Path, end: object
) -> None:
    """As in GPT-2's own files."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (own_dir / name).unlink(missing_ok=True)
    (own_dir / "config.json").write_text(json.dumps({"eos_token_id": end, "bos_token_id": 1}))
    tokenizer = Tokenizer(own_dir)
    assert tokenizer.end_token_id == (None if end in (-1, 10**9, None) else 2)
    (own_dir / "chat_template.jinja").write_text("{{ bos_token }}x")
    first, *_ = Tokenizer(own_dir).encode_chat([ChatMessage("user", "a")])
    assert first == 1


def test_a_tokenizer_whose_beginning_is_null_has_none(own_dir: Path) -> None:
    """As in Qwen's files, whose config.json names one."""
    (own_dir / "tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    (own_dir / "config.json").write_text(json.dumps({"bos_token_id": 1}))
    (own_dir / "special_tokens_map.json").unlink(missing_ok=True)
    (own_dir / "chat_template.jinja").write_text("{{ not bos_token }}")
    tokenizer = Tokenizer(own_dir)
    prompt = tokenizer.encode_chat([ChatMessage("user", "a")])
    assert tokenizer.decode(prompt, False) == "True"


@pytest.mark.parametrize("prefix", [True, False, None])
def test_tokenizer_config_json_may_put_a_space_before_the_text(
    own_dir: Path, prefix: bool | None
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import ByteLevel

    backend = Backend.from_file(str(own_dir / "tokenizer.json"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=prefix is False)
    backend.save(str(own_dir / "tokenizer.json"))
    settings = json.loads((own_dir / "tokenizer_config.json").read_text())
    settings |= {} if prefix is None else {"add_prefix_space": prefix}
    (own_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = Backend.from_file(str(own_dir / "tokenizer.json"))
    plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text = " river" if prefix else "river"
    assert Tokenizer(own_dir).encode("river") == plain.encode(text).ids


@pytest.mark.parametrize("decoder", ["sentencepiece", "none"])
def test_the_tokens_of_a_byte_level_pre_tokenizer_have_its_decoder(
    own_dir: Path, decoder: str
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    backend = Backend.from_file(str(own_dir / "tokenizer.json"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts) if decoder == "sentencepiece" else None
    backend.save(str(own_dir / "tokenizer.json"))
    tokenizer = Tokenizer(own_dir)
    assert tokenizer.is_byte_level
    assert tokenizer.decode(tokenizer.encode("a river\nand ü")) == "a river\nand ü"


OWN_CODE = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}


@pytest.mark.parametrize("has_tokenizer_json", [True, False])
def test_code_of_the_model_is_not_run(
    own_dir: Path, tmp_path: Path, tokenizer: Tokenizer, has_tokenizer_json: bool
) -> None:
    (own_dir / "tokenizer_config.json").write_text(json.dumps(OWN_CODE))
    (own_dir / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass")
    if has_tokenizer_json:
        assert Tokenizer(own_dir).encode("The river, 2003.") == tokenizer.encode("The river, 2003.")
    else:
        (own_dir / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModelError):
            Tokenizer(own_dir)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_sentencepiece_model_names_the_package_that_reads_it(own_dir: Path) -> None:
    (own_dir / "tokenizer.json").rename(own_dir / "tokenizer.model")
    (own_dir / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model .* package sentencepiece"):
        Tokenizer(own_dir)


@pytest.mark.parametrize(("token_ids", "index"), [([0, 383], 1), ([-1], 0), ([5, 382, -7, 999], 2)])
def test_ids_out_of_range_are_named(token_ids: list[int], index: int) -> None:
    with pytest.raises(InvalidValueError) as caught:
        check_token_ids("prompt_token_ids", token_ids, 383)
    assert caught.value.field == f"prompt_token_ids[{index}]"
    assert caught.value.value == token_ids[index]
    assert "from 0 to 382" in str(caught.value)


@pytest.mark.parametrize("token_ids", [[], [0, 382]])
def test_ids_in_range_are_accepted(token_ids: list[int]) -> None:
    check_token_ids("prompt_token_ids", token_ids, 383)


@pytest.mark.model
def test_smollm2_adds_its_system_message(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    text = tokenizer.decode(tokenizer.encode_chat([ChatMessage("user", "Hi")]), False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_smollm2_splits_digits(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    words = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("in   2003")]
    assert words == ["in", "   ", "2", "0", "0", "3"]


def test_tokenizers_can_be_loaded_concurrently(tiny_model_dir: Path) -> None:
    """Runs in a new process, since the race is in the first imports."""
    code = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "from specdec.text.tokenizer import Tokenizer\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    list(pool.map(Tokenizer, [Path(sys.argv[1])] * 4))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_model_dir)], check=True)
