"""Prompts that the target writes itself."""

from dataclasses import replace

import pytest

from specdec.text.tokenizer import Tokenizer
from specdec.training.data.corpus import Corpus, CorpusWriter, Sample
from specdec.training.data.generation import GenerationConfig, generate_corpus
from specdec.training.data.self_written import UsablePrompts, UserTurn
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage
from tests.specdec.tiny import TURN_END
from tests.specdec.training.data.test_corpus import INFO


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return Tokenizer(tiny_model_dir)


def test_the_turn_is_that_of_a_served_conversation(tokenizer):
    turn = UserTurn.of(tokenizer)
    served = tokenizer.encode_chat([ChatMessage("user", "When will it open?")])
    text = tokenizer.encode("When will it open?", add_special_tokens=False)
    written = [*turn.token_ids, *text, turn.end_token_id]
    assert served[: len(written)] == written
    assert turn.end_token_id == tokenizer.token_id(TURN_END)
    assert turn.sampling_params(3).stop_token_ids == (turn.end_token_id,)


def test_a_template_that_ends_a_turn_by_text_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}[{{ m['content'] }}] answer{% endfor %}"
    monkeypatch.setattr(tokenizer.transformers, "chat_template", template)
    with pytest.raises(InvalidValueError, match="prompts file"):
        UserTurn.of(tokenizer)


def test_prompts_of_a_few_words_that_ended_are_used_once():
    usable = UsablePrompts()
    assert usable.accept(" Ask the baker\n", has_ended=True) == "Ask the baker"
    assert usable.accept("Ask the baker", has_ended=True) is None
    assert usable.accept("Ask the children", has_ended=False) is None
    assert usable.accept("Ask", has_ended=True) is None
    assert usable.accept("Ask the children", has_ended=True) == "Ask the children"


def test_the_target_writes_prompts_and_answers_them(tiny_model_dir, tokenizer, tmp_path):
    engine = {"kernels": "torch", "kv_cache_memory_gib": 0.05}
    config = GenerationConfig(
        str(tiny_model_dir), max_new_tokens=4, max_num_seqs=12, num_self_written=12, engine=engine
    )
    progress = generate_corpus(config, [], tmp_path)
    corpus = Corpus.open(tmp_path)
    # A token ends the turn once in a few hundred, so that some prompts end within 128 tokens.
    assert progress.num_samples == len(corpus) > 0
    assert progress.num_samples + progress.num_skipped == 12
    turn = UserTurn.of(tokenizer)
    for sample in corpus:
        prompt = sample.token_ids[: sample.num_prompt_tokens]
        assert prompt[: len(turn.token_ids)] == turn.token_ids
        assert prompt.count(turn.end_token_id) == 1
    # Those that were dropped are recorded: none is written again.
    assert progress.num_skipped > 0
    assert generate_corpus(config, [], tmp_path).num_requests == 0


def test_prefixes_begin_the_prompts_that_the_target_writes(tiny_model_dir, tokenizer, tmp_path):
    engine = {"kernels": "torch", "kv_cache_memory_gib": 0.05}
    prefixes = ("Ask the baker", "When will the river")
    config = GenerationConfig(
        str(tiny_model_dir), max_new_tokens=4, max_num_seqs=12, num_self_written=24,
        prompt_prefixes=prefixes, engine=engine,
    )  # fmt: skip
    generate_corpus(config, [], tmp_path)
    turn = UserTurn.of(tokenizer)
    corpus = Corpus.open(tmp_path)
    texts = [turn.text_of(each.token_ids[: each.num_prompt_tokens], tokenizer) for each in corpus]
    assert {prefix for prefix in prefixes for text in texts if text.startswith(prefix)} == {
        *prefixes
    }
    assert all(text.startswith(prefixes) and text not in prefixes for text in texts)
    with pytest.raises(InvalidValueError, match="prompt_prefixes"):
        generate_corpus(replace(config, prompt_prefixes=prefixes[:1]), [], tmp_path)


def test_a_later_run_repeats_no_prompt_of_an_earlier_one(tokenizer, tmp_path):
    turn, text = UserTurn.of(tokenizer), "Ask the baker about the river"
    prompt = tuple(tokenizer.encode_chat([ChatMessage("user", text)]))
    with CorpusWriter(tmp_path, INFO) as writer:
        writer.add([Sample((*prompt, 5), len(prompt), 0.0)], [-1])
        writer.add([Sample((*prompt[:-1], 7, 5), len(prompt), 0.0)], [3])
        used = [turn.text_of(each, tokenizer) for each in writer.prompts(lambda each: each < 0)]
    assert used == [text]
    usable = UsablePrompts(used)
    assert usable.accept(text, has_ended=True) is None
    assert usable.accept(f"{text} again", has_ended=True) is not None
