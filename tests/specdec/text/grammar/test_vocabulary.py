"""Forced text that has the name of a special token is spelled by other tokens."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.tokenizer import Tokenizer as TextTokenizer
from specdec.types.errors import GrammarError
from specdec.types.sampling.sampling_params import StructuredOutput
from tests.specdec.text.grammar.vocabulary import allowed
from tests.specdec.tiny import llama2_like_tokenizer

END, TURN, MARK = "</s>", "<|turn|>", "<tool_call>"


ACCENT = "\u0301"
"""Combines with the character before it under NFC."""


def byte_level_tokenizer(directory):
    """Return that of the tiny model, which normalizes text and adds a space, as some do."""
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def unigram_tokenizer(directory):
    pieces = [
        ("<unk>", 0.0),
        (END, 0.0),
        ("▁", -2.0),
        *((chr(c), -3.0) for c in (*range(33, 127), 0x301)),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZERS = {
    "byte level": byte_level_tokenizer,
    "byte fallback": lambda _: llama2_like_tokenizer(),
    "unigram": unigram_tokenizer,
}
SPECS = {
    "choice": lambda text: {"choice": (text,)},
    "regex": lambda text: {"regex": "".join(f"[{c}]" if c in "|<" else c for c in text)},
    "json": lambda text: {"json_schema": json.dumps({"const": text})},
    "grammar": lambda text: {"grammar": f"start: {json.dumps(text)}"},
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tiny_model_dir, tmp_path_factory):
    """One whose last tokens are two special ones, of which the first ends an output, and a mark."""
    fast = TOKENIZERS[request.param](tiny_model_dir)
    special = [AddedToken(text, special=True, normalized=False) for text in (END, TURN)]
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.add_tokens([AddedToken(MARK, special=False, normalized=False)])
    directory = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(directory)
    return TextTokenizer(directory)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    ends = {tokenizer.token_id(END)}
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 3, ends, tries_first=False)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "text", [END, f"a{END}b", f"q{TURN}", f"{TURN}{END}{TURN}", f"x{MARK}y", f"xe{ACCENT}"]
)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("is_forced", [False, True])
def test_forced_text_may_contain_names_of_tokens(compiler, tokenizer, kind, text, is_forced):
    matcher = compiler.compile(StructuredOutput(**SPECS[kind](text))).matcher()
    end, tokens = tokenizer.token_id(END), []
    while not matcher.is_finished:
        mask = allowed(matcher.allowed_mask())
        forced = matcher.forced_tokens(1) if is_forced else ()
        token = forced[0] if forced else min(mask)
        assert token in mask
        assert token not in tokenizer.special_token_ids
        matcher.advance(token)
        tokens.append(token)
    assert allowed(matcher.allowed_mask()) == {end}
    assert tokenizer.decode(tokens) == (
        json.dumps(text, ensure_ascii=False) if kind == "json" else text
    )
    mark = tokenizer.token_id(MARK)
    assert (mark in tokens) <= (MARK in text), "a mark that is no special token is text"


def test_a_character_without_tokens_ends_the_request(tmp_path, tiny_model_dir):
    unigram_tokenizer(tiny_model_dir).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    compiler = GrammarCompiler(tokenizer, 200, {1}, tries_first=False)
    matcher = compiler.compile(StructuredOutput(choice=("né",))).matcher()
    matcher.advance(tokenizer.token_id("n"))
    with pytest.raises(GrammarError, match="no text satisfies it"):
        matcher.allowed_mask()
    compiler.close()
