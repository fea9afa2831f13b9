"""Tests of the translation of tokens between the draft and target vocabularies."""

import numpy as np
import pytest

from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers.cross_vocab.draft_vocabulary import (
    DraftVocabulary,
    ModelVocabulary,
    map_vocabularies,
)
from specdec.speculation.proposers.cross_vocab.vocab_adapter import (
    _MAX_READ_TOKENS,
    CrossVocabAdapter,
    EqualIds,
    VocabAdapter,
)
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_map import VocabularyMap
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import request
from tests.specdec.tiny import CHAT_TEMPLATE, TEXT, train_tokenizer
from tests.specdec.trained import byte_level, sentencepiece


def sequence(token_ids, temperature=0.0, **rules):
    rules = SamplingRules(temperature=temperature, **rules)
    return Sequence(0, request("r", token_ids), rules, detokenizer=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    def model(name, tokenizer):
        directory = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(directory)
        read = Tokenizer(directory)
        return ModelVocabulary(read, read.vocab_size)

    return {
        "chat": model("chat", train_tokenizer(480)),
        "byte-level": model("byte", byte_level(TEXT, 400)),
        "sentencepiece": model("piece", sentencepiece(TEXT, 420)),
    }


@pytest.fixture(scope="module")
def translate(models):
    def translate(draft, target):
        draft, target = models[draft], models[target]
        shared = map_vocabularies(draft, target)
        return CrossVocabAdapter(shared, draft.spelling, target.spelling)

    return translate


PAIRS = [
    ("byte-level", "chat"),
    ("sentencepiece", "chat"),
    ("byte-level", "sentencepiece"),
    ("chat", "sentencepiece"),
]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_the_draft_gets_the_text_as_its_own_tokenizer_encodes_it(models, translate, draft, target):
    """The target's prefix tokens are not part of the text; the draft adds its own prefix."""
    text = TEXT[1:600]
    seq = sequence(models[target].tokenizer.encode(text))
    view = translate(draft, target).view(seq)
    assert view.is_whole
    assert view.token_ids == models[draft].tokenizer.encode(text)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_greedy_drafts_are_encoded_by_the_targets_tokenizer(models, translate, draft, target):
    adapter, context, text = translate(draft, target), "The river", " begins as a thread"
    seq = sequence(models[target].tokenizer.encode(context))
    adapter.view(seq)
    drafted = models[draft].spelling.encode_inside(text)
    expected = tuple(models[target].spelling.encode_inside(text))
    assert adapter.to_target(seq, drafted, 99) == expected
    assert adapter.to_target(seq, drafted, 2) == expected[:2]
    assert 1 <= adapter.num_draft_tokens(seq, 2) <= 4


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_sampled_drafts_are_translated_one_by_one(models, translate, draft, target):
    adapter, seq = translate(draft, target), sequence([5], temperature=0.8)
    shared = map_vocabularies(models[draft], models[target])
    drafted = np.flatnonzero(shared.draft_to_target >= 0)[[3, 70, 200]].tolist()
    assert adapter.num_draft_tokens(seq, 3) == 3
    assert adapter.to_target(seq, drafted, 3) == tuple(shared.draft_to_target[drafted].tolist())
    missing = int(np.flatnonzero(shared.draft_to_target < 0)[0])
    assert len(adapter.to_target(seq, [drafted[0], missing, drafted[1]], 3)) == 1


def test_a_draft_that_ends_the_text_ends_it_for_the_target_too(models, translate):
    adapter = translate("sentencepiece", "chat")
    draft, target = models["sentencepiece"], models["chat"]
    seq = sequence(target.tokenizer.encode("The river"))
    adapter.view(seq)
    drafted = [*draft.spelling.encode_inside(" is"), draft.tokenizer.end_token_id, 300, 301]
    expected = (*target.spelling.encode_inside(" is"), target.tokenizer.end_token_id)
    assert adapter.to_target(seq, drafted, 9) == expected


def test_a_chat_prompt_keeps_the_text_of_its_template(models, translate):
    assert "<|im_start|>" in CHAT_TEMPLATE
    text = "<|im_start|>user\nAsk the baker<|im_end|>\n<|im_start|>assistant\n"
    seq = sequence(models["chat"].tokenizer.encode(text))
    view = translate("byte-level", "chat").view(seq)
    assert models["byte-level"].spelling.text(view.token_ids) == text.encode()


def test_a_long_prompt_is_translated_in_parts(models, translate):
    adapter = translate("byte-level", "chat")
    token_ids = models["chat"].tokenizer.encode(TEXT * 12)
    seq = sequence(token_ids)
    num_calls = -(-len(token_ids) // _MAX_READ_TOKENS)
    assert num_calls > 1
    views = [adapter.view(seq) for _ in range(num_calls)]
    assert [view.is_whole for view in views] == [False] * (num_calls - 1) + [True]
    assert views[-1].token_ids == models["byte-level"].tokenizer.encode(TEXT * 12)
    adapter.release(seq.seq_id)
    assert not adapter.view(seq).is_whole


def test_tokens_that_only_one_model_has_are_replaced():
    to_draft = np.array([0, 1, 2, -1, -1], dtype=np.int32)
    to_target = np.array([0, 1, 2, -1], dtype=np.int32)
    adapter = EqualIds(VocabularyMap(to_target, to_draft, has_equal_ids=True))
    seq = sequence([2, 4, 1])
    assert adapter.view(seq).token_ids == [2, 0, 1]
    seq.token_ids += [3, 2]
    view = adapter.view(seq)
    assert (view.token_ids, view.num_kept) == ([2, 0, 1, 0, 2], 3)
    assert adapter.to_target(seq, [1, 2, 3, 1], 4) == (1, 2)


def test_an_admission_maps_token_ids_to_the_draft_vocabulary():
    """Special tokens may have different IDs even if all text tokens have equal ones."""
    to_draft = np.array([0, 1, 2, 4, 3], dtype=np.int32)
    adapter = EqualIds(VocabularyMap(to_draft, to_draft, has_equal_ids=True))
    seq = sequence([2, 4, 1], repetition_penalty=1.1)
    assert adapter.admission(seq).token_ids == (2, 3, 1)
    assert adapter.admission(sequence([2, 4, 1])).token_ids == ()


def test_the_simplest_sufficient_adapter_is_selected(tmp_path):
    directories = {}
    for name, vocab in (("same", 383), ("twin", 383), ("other", 420)):
        directories[name] = tmp_path / name
        train_tokenizer(vocab).save_pretrained(directories[name])
        size = 400 if name == "other" else 383
        (directories[name] / "config.json").write_text(config_json(size))
    padded = tmp_path / "padded"
    train_tokenizer(383).save_pretrained(padded)
    (padded / "config.json").write_text(config_json(400))

    def kind(draft):
        found = DraftVocabulary.between(draft, directories["same"])
        return type(found.new_adapter()), found.shared is None

    assert kind(directories["same"]) == (VocabAdapter, True)
    assert kind(directories["twin"]) == (VocabAdapter, True)
    assert kind(padded) == (EqualIds, False)
    assert kind(directories["other"]) == (CrossVocabAdapter, False)


def config_json(vocab_size):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=vocab_size,
        architectures=["LlamaForCausalLM"],
    ).to_json_string()
