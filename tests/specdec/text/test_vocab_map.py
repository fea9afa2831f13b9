# Modules: specdec.speculation.proposers.cross_vocab.draft_vocabulary
"""The map between the shared tokens of two vocabularies."""

import dataclasses

import pytest

from specdec.speculation.proposers.cross_vocab.draft_vocabulary import (
    ModelVocabulary,
    map_vocabularies,
)
from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_map import require_enough_shared
from specdec.types.errors import InvalidValueError
from tests.specdec.tiny import TEXT, TURN_END, train_tokenizer
from tests.specdec.trained import byte_level, sentencepiece


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    def vocabulary(name, tokenizer):
        directory = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(directory)
        read = Tokenizer(directory)
        return ModelVocabulary(read, read.vocab_size)

    return {
        "target": vocabulary("target", train_tokenizer(480)),
        "byte-level": vocabulary("byte", byte_level(TEXT, 400)),
        "sentencepiece": vocabulary("piece", sentencepiece(TEXT, 420)),
    }


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_mapped_tokens_have_the_same_text(vocabularies, kind):
    draft, target = vocabularies[kind], vocabularies["target"]
    shared = map_vocabularies(draft, target)
    pairs = [(d, t) for d, t in enumerate(shared.draft_to_target.tolist()) if t >= 0]
    assert len(pairs) == shared.num_shared > 250
    for draft_id, target_id in pairs:
        assert shared.target_to_draft[target_id] == draft_id
        if draft.spelling.is_text(draft_id):
            assert draft.spelling.text([draft_id]) == target.spelling.text([target_id])
    assert (shared.target_to_draft >= 0).sum() == len(pairs)
    assert not shared.has_equal_ids


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_every_common_text_is_mapped(vocabularies, kind):
    draft, target = vocabularies[kind], vocabularies["target"]
    shared = map_vocabularies(draft, target)
    texts = set(draft.spelling.ordinary.values()) & set(target.spelling.ordinary.values())
    assert shared.num_shared == len(texts) + 1  # and the end token


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_end_tokens_are_mapped_for_any_name(vocabularies, kind):
    draft, target = vocabularies[kind], vocabularies["target"]
    shared = map_vocabularies(draft, target)
    [end] = [target.tokenizer.vocabulary[TURN_END]]
    assert shared.draft_to_target[draft.tokenizer.end_token_id] == end
    special = draft.tokenizer.special_token_ids - {draft.tokenizer.end_token_id}
    assert all(shared.draft_to_target[token] == -1 for token in special)


def test_a_special_token_is_not_mapped_to_the_text_of_its_name(vocabularies, tmp_path):
    tokenizer = byte_level(TEXT, 400)
    tokenizer.add_tokens([TURN_END])  # as text, not as a special token
    tokenizer.save_pretrained(tmp_path)
    read = Tokenizer(tmp_path)
    draft = ModelVocabulary(read, read.vocab_size)
    shared = map_vocabularies(draft, vocabularies["target"])
    assert shared.draft_to_target[read.vocabulary[TURN_END]] == -1


def test_padding_is_not_mapped(vocabularies):
    target = vocabularies["target"]
    padded = dataclasses.replace(target, size=target.size + 32)
    shared = map_vocabularies(padded, target)
    assert shared.has_equal_ids
    assert not padded.equals(target)
    assert shared.draft_to_target.tolist() == [*range(target.size), *[-1] * 32]
    assert shared.target_to_draft.tolist() == [*range(target.size)]


def test_equal_tokenizers_share_tokens_of_equal_text(vocabularies):
    """A byte and a character with equal text: with different tokenizers only one is mapped."""
    draft = vocabularies["sentencepiece"]
    letter = draft.tokenizer.vocabulary["<0x65>"]
    padded = dataclasses.replace(draft, size=draft.size + 8)
    assert map_vocabularies(padded, draft).draft_to_target[letter] == letter
    assert map_vocabularies(draft, vocabularies["target"]).draft_to_target[letter] == -1


def test_tokens_beyond_the_models_vocabulary_are_not_mapped(vocabularies):
    draft = dataclasses.replace(vocabularies["byte-level"], size=390)
    shared = map_vocabularies(draft, vocabularies["target"])
    assert len(shared.draft_to_target) == 390
    assert shared.target_to_draft.max() < 390


def test_too_few_shared_tokens_are_rejected_in_one_line(vocabularies):
    shared = map_vocabularies(vocabularies["byte-level"], vocabularies["target"])
    require_enough_shared(shared, "speculative_config.model", "some/draft")
    few = dataclasses.replace(shared, draft_to_target=shared.draft_to_target.clip(max=-1))
    with pytest.raises(InvalidValueError) as raised:
        require_enough_shared(few, "speculative_config.model", "some/draft")
    assert str(raised.value) == (
        "speculative_config.model is 'some/draft'; it must be a model that shares 25% of the "
        "smaller vocabulary with the target; this one shares 0%"
    )
