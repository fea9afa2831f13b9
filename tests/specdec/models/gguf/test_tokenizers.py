"""Tokenizers of GGUF files: what transformers leaves out of them."""

import gguf
import pytest

from specdec.models.gguf.header import read_header
from specdec.models.gguf.tokenizers import convert_tokenizer
from specdec.text.tokenizer import Tokenizer
from tests.specdec.models.gguf.family_files import add_tokenizer

PIECES = ["▁", "t", "h", "e", "▁t", "he", "▁the", "r", "th", "the"]
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]


def converted(path, architecture, add_keys):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    add_keys(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return convert_tokenizer(path, read_header(path).metadata, splits_digits=False)


def add_pieces(writer, **keys):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SENTENCEPIECE)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(PIECES))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_the_space_before_a_text_is_as_the_file_has_it(tmp_path, architecture, has_prefix):
    tokenizer = converted(
        tmp_path / "m.gguf",
        architecture,
        lambda writer: add_pieces(writer, add_space_prefix=has_prefix),
    )
    backend = tokenizer.backend_tokenizer
    assert backend.encode("the the", add_special_tokens=False).tokens[0] == (
        "▁the" if has_prefix else "the"
    )
    [the] = [SENTENCEPIECE.index("▁the")]
    assert backend.decode([the]) == ("the" if has_prefix else " the")


@pytest.mark.parametrize("has_bos", [True, False])
def test_a_prompt_begins_as_the_file_has_it(tmp_path, has_bos):
    tokenizer = converted(
        tmp_path / "m.gguf", "llama", lambda writer: add_pieces(writer, add_bos_token=has_bos)
    )
    assert (tokenizer("the")["input_ids"][0] == 1) == has_bos


@pytest.mark.parametrize("has_default", [True, False])
def test_the_template_for_tools_is_read(tmp_path, has_default):
    def add(writer):
        add_pieces(writer)
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
        writer.add_string("tokenizer.chat_template.../escaped", "{{ messages }}")
        if has_default:
            writer.add_chat_template("{{ messages[0].content }}")

    converted(tmp_path / "m.gguf", "llama", add).save_pretrained(tmp_path / "saved")
    template = Tokenizer(tmp_path / "saved").chat_template
    assert template.text == "{{ tools }}"
    assert template.plain_text == ("{{ messages[0].content }}" if has_default else "")


def byte_level(path, model_dir, pre, architecture="llama", **keys):
    def add(writer):
        add_tokenizer(writer, model_dir)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_bos_token_id(1)
        for name, value in keys.items():
            getattr(writer, f"add_{name}")(value)

    return converted(path, architecture, add)


@pytest.mark.parametrize(
    ("pre", "architecture"), [("smollm", "llama"), ("starcoder", "starcoder2")]
)
def test_digits_are_pieces_where_the_file_names_such_a_pattern(
    tiny_model_dir, tmp_path, pre, architecture
):
    for name, count in ((pre, 4), ("gpt-2", 1)):
        tokenizer = byte_level(tmp_path / "m.gguf", tiny_model_dir, name, architecture)
        tokenizer.save_pretrained(tmp_path / name)
        loaded = Tokenizer(tmp_path / name).transformers.backend_tokenizer
        assert len(loaded.pre_tokenizer.pre_tokenize_str("2003")) == count


@pytest.mark.parametrize("pre", ["default", None])
def test_a_file_without_a_pattern_is_split_as_by_llama_cpp(tiny_model_dir, tmp_path, pre):
    text = "a==b (2003), it's  1,5\n"
    tokenizer = byte_level(tmp_path / "m.gguf", tiny_model_dir, pre)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    found = [text[begin:end] for _, (begin, end) in pieces]
    assert found == [
        *("a", "==", "b", " ", "(", "200", "3", "),", " it", "'", "s", " ", " ", "1", ",", "5"),
        "\n",
    ]


@pytest.mark.parametrize(
    ("pre", "keys", "has_bos"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
    ],
)
def test_a_kind_of_tokenizer_decides_what_the_file_leaves_out(
    tiny_model_dir, tmp_path, pre, keys, has_bos
):
    tokenizer = byte_level(tmp_path / "m.gguf", tiny_model_dir, pre, **keys)
    assert (tokenizer("the")["input_ids"][0] == 1) == has_bos
    assert tokenizer.backend_tokenizer.model.ignore_merges == (pre == "llama-bpe")
