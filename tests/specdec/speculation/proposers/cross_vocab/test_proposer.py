"""Tests of draft models with another tokenizer: they are often right and change no output."""

import pytest

from specdec.speculation.proposers import DraftVocabulary
from specdec.speculation.proposers.draft_model import MAX_PENDING_TOKENS
from specdec.text.tokenizer import Tokenizer
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.tiny import TEXT, shuffled_llama_dir, tiny_llama_dir, train_tokenizer
from tests.specdec.trained import byte_level, sentencepiece, trained_llama_dir

GREEDY, SAMPLED = 0.0, 0.8
NUM_TOKENS = 40
LEARNT = TEXT[:640]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return trained_llama_dir(directory, train_tokenizer(480), LEARNT, num_steps=100)


@pytest.fixture(scope="module")
def draft_dirs(tmp_path_factory):
    tokenizers = {"byte-level": byte_level(TEXT, 400), "sentencepiece": sentencepiece(TEXT, 420)}
    return {
        name: trained_llama_dir(
            tmp_path_factory.mktemp(name), tokenizer, LEARNT, num_steps=100, padded_to=448
        )
        for name, tokenizer in tokenizers.items()
    }


def requests(directory, **params):
    """Return requests longer than `MAX_PENDING_TOKENS` and one that ends within a character."""
    tokenizer = Tokenizer(directory)
    prompts = [tokenizer.encode(LEARNT[start : start + 90]) for start in (1, 150, 300, 450)]
    assert max(map(len, prompts)) > MAX_PENDING_TOKENS
    prompts.append(tokenizer.encode("the river \N{SNOWMAN}")[:-1])
    return [
        request(f"r{index}", prompt, seed=index, max_tokens=NUM_TOKENS, **params)
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def reference(target_dir):
    return {
        temperature: generate(local_engine(target_dir, engine_config(0)), target_dir, temperature)
        for temperature in (GREEDY, SAMPLED)
    }


def generate(engine, directory, temperature):
    """Return the generated token IDs by request ID."""
    transcripts = run(engine, requests(directory, temperature=temperature))
    return {name: transcript.token_ids for name, transcript in transcripts.items()}


def kinds():
    """Yield (kind, temperature, least rate, k); make test has two of each kind."""
    for kind, first in (("byte-level", 1), ("sentencepiece", 4)):
        for temperature, least_rate, quick in ((GREEDY, 0.25, first), (SAMPLED, 0.05, 5 - first)):
            for k in (1, 4):
                marks = () if k == quick else pytest.mark.slow
                yield pytest.param(kind, temperature, least_rate, k, marks=marks)


@pytest.mark.parametrize(("kind", "temperature", "least_rate", "k"), list(kinds()))
def test_drafts_are_often_right_and_change_nothing(
    target_dir, draft_dirs, reference, kind, temperature, least_rate, k
):
    vocabulary = DraftVocabulary.between(draft_dirs[kind], target_dir)
    proposer = draft_model(draft_dirs[kind], vocabulary=vocabulary)
    engine = local_engine(target_dir, engine_config(k), proposer=proposer)
    assert generate(engine, target_dir, temperature) == reference[temperature]
    proposer.check_integrity()
    speculation = engine.stats().counts.speculation
    assert speculation.num_draft_tokens > 50
    assert speculation.acceptance_rate >= least_rate


@pytest.mark.parametrize("temperature", [GREEDY, SAMPLED])
def test_the_target_with_its_ids_shuffled_draws_the_same(
    target_dir, reference, tmp_path, temperature
):
    """Sampling noise depends on the target's IDs and positions; only token texts are compared."""
    directory = shuffled_llama_dir(target_dir, tmp_path)
    vocabulary = DraftVocabulary.between(directory, target_dir)
    proposer = draft_model(directory, vocabulary=vocabulary)
    engine = local_engine(target_dir, engine_config(4), proposer=proposer)
    assert generate(engine, target_dir, temperature) == reference[temperature]
    assert engine.stats().counts.speculation.acceptance_rate >= 0.9


def test_draft_ranks_agree_with_one(target_dir, draft_dirs, reference):
    directory = draft_dirs["sentencepiece"]
    vocabulary = DraftVocabulary.between(directory, target_dir)

    def generate_on(group):
        proposer = draft_model(directory, group, vocabulary=vocabulary)
        engine = local_engine(target_dir, engine_config(3), group, proposer)
        return generate(engine, target_dir, SAMPLED), engine.stats().counts.speculation

    ranks = run_ranks(3, generate_on)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == reference[SAMPLED]
    assert ranks[0][1] == run_ranks(1, generate_on)[0][1]


def test_preempted_sequences_and_a_small_pool_change_nothing(target_dir, draft_dirs, reference):
    vocabulary = DraftVocabulary.between(draft_dirs["byte-level"], target_dir)
    proposer = draft_model(draft_dirs["byte-level"], vocabulary=vocabulary, num_blocks=50)
    config = engine_config(3, num_blocks=50)
    engine = local_engine(target_dir, config, proposer=proposer)
    assert generate(engine, target_dir, GREEDY) == reference[GREEDY]
    assert engine.stats().counts.num_preemptions > 0
    assert engine.stats().counts.speculation.num_accepted_tokens > 0
    proposer.check_integrity()


def test_a_repeated_prompt_is_not_run_again(target_dir, draft_dirs):
    vocabulary = DraftVocabulary.between(draft_dirs["byte-level"], target_dir)
    proposer = draft_model(draft_dirs["byte-level"], vocabulary=vocabulary)
    engine = local_engine(target_dir, engine_config(3), proposer=proposer)
    prompt = Tokenizer(target_dir).encode(LEARNT[1:350])
    first = run(engine, [request("r", prompt)])["r"].token_ids
    caught_up = proposer.num_catch_up_tokens
    assert run(engine, [request("r", prompt)])["r"].token_ids == first
    assert proposer.num_catch_up_tokens == caught_up > 100


def test_invalid_utf8_is_drafted_for_too(tiny_model_dir, draft_dirs):
    """The random target generates bytes that are not valid UTF-8, among others."""
    vocabulary = DraftVocabulary.between(draft_dirs["sentencepiece"], tiny_model_dir)
    proposer = draft_model(draft_dirs["sentencepiece"], vocabulary=vocabulary)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    plain = local_engine(tiny_model_dir, engine_config(0))
    assert generate(engine, tiny_model_dir, SAMPLED) == generate(plain, tiny_model_dir, SAMPLED)
    proposer.check_integrity()
    assert engine.stats().counts.speculation.num_draft_tokens > 50


def test_the_same_model_with_other_padding_drafts_as_itself(tmp_path, tiny_model_dir):
    """Qwen models do this: they share a tokenizer but pad the vocabulary to different sizes."""
    padded = tiny_llama_dir(tmp_path)
    pad_vocabulary(padded, 390)
    vocabulary = DraftVocabulary.between(padded, tiny_model_dir)
    proposer = draft_model(padded, vocabulary=vocabulary)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    plain = local_engine(tiny_model_dir, engine_config(0))
    assert generate(engine, tiny_model_dir, SAMPLED) == generate(plain, tiny_model_dir, SAMPLED)
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98


def pad_vocabulary(directory, size):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(size, mean_resizing=False)
    model.get_input_embeddings().weight.data[383:] = -9.0
    model.save_pretrained(directory)
