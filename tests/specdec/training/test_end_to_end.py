# Modules: specdec.training.run
"""A newcomer's path: prompts, a corpus, a trained head, and its drafts in the engine."""

import dataclasses
import hashlib
import json

import pytest

from specdec import LLM, LoRARequest, SamplingParams
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Corpus
from specdec.training.data.generation import GenerationConfig, generate_corpus
from specdec.training.data.prompts import PromptRecord
from specdec.training.data.target import TargetPrecision
from specdec.training.drafters.base import TRAINED_METHODS
from specdec.training.export import export
from specdec.training.run import TrainingFiles, open_run
from specdec.types.errors import InvalidValueError
from tests.specdec.adapters import adapter_dir
from tests.specdec.tiny import CHAT_TEMPLATE, TEXT
from tests.specdec.trained import byte_level, trained_llama_dir

ENGINE = {"kernels": "torch", "kv_cache_memory_gib": 0.05}
CONFIG = TrainingConfig(
    depth=3,
    num_epochs=20,
    batch_tokens=512,
    learning_rate=4e-3,
    held_out=0.2,
    evaluate_every=30,
    export_dtype="float32",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(TEXT, 320)
    tokenizer.chat_template = CHAT_TEMPLATE
    return trained_llama_dir(directory, tokenizer, TEXT, num_steps=150)


@pytest.fixture(scope="module")
def prompts():
    words = TEXT.split()
    return [PromptRecord((" ".join(words[i : i + 4]),)) for i in range(0, len(words) - 4, 3)]


@pytest.fixture(scope="module")
def corpus(model_dir, prompts, tmp_path_factory):
    config = GenerationConfig(
        str(model_dir), max_new_tokens=32, temperatures=(0.0, 0.8), engine=ENGINE
    )
    directory = tmp_path_factory.mktemp("corpus")
    generate_corpus(config, prompts, directory)
    return directory


def serve(model_dir, prompts, head=None, lora=None):
    """Return the greedy and sampled texts after prompts, and the share of accepted drafts."""
    speculation = None
    if head is not None:
        speculation = {"model": str(head), "num_speculative_tokens": 3, "policy": "threshold"}
    engine = {**ENGINE, "enable_lora": lora is not None}
    with LLM(str(model_dir), speculative_config=speculation, **engine) as llm:
        params = [
            SamplingParams(temperature=temperature, max_tokens=24, seed=7)
            for temperature in (0.0, 0.8)
            for _ in prompts
        ]
        found = llm.generate([*prompts, *prompts], params, use_tqdm=False, lora_request=lora)
    texts = [each.outputs[0].token_ids for each in found]
    if head is None:
        return texts, 0.0
    drafted = sum(each.speculation.num_draft_tokens for each in found)
    accepted = sum(each.speculation.num_accepted_tokens for each in found)
    return texts, accepted / drafted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["eagle3", "dspark", "dflash", "medusa", "draft_model"])
def test_a_trained_head_is_lossless_and_better_than_an_untrained_one(
    method, model_dir, corpus, tmp_path
):
    config = dataclasses.replace(CONFIG, method=method)
    if method == "draft_model":
        config = dataclasses.replace(config, num_layers=1)  # of two
    files = TrainingFiles(str(model_dir), (corpus,), tmp_path / "run")
    precision = TargetPrecision(kernels="torch")
    trainer = open_run(files, config, precision, 200, lambda _: None)
    untrained = tmp_path / "untrained"
    export(trainer.drafter, untrained, "float32", {})
    trainer.run(lambda _: None)
    _, held_out = Corpus.open(corpus).split(config.held_out, config.seed)
    prompts = [list(each.token_ids[: each.num_prompt_tokens]) for each in held_out[:8]]
    plain, _ = serve(model_dir, prompts)
    first, before = serve(model_dir, prompts, untrained)
    texts, after = serve(model_dir, prompts, trainer.head_directory)
    assert plain == first == texts
    assert after > 1.1 * before, (before, after)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_the_engine_accepts_what_the_trainer_predicts(method, model_dir, corpus, tmp_path):
    """Accepted drafts of greedy held-out answers, in the trainer and in the engine.

    The engine drafts no token that it could not send, so they differ by the last step of an answer.
    """
    config = dataclasses.replace(CONFIG, method=method, num_epochs=8)
    files = TrainingFiles(str(model_dir), (corpus,), tmp_path / "run")
    trainer = open_run(files, config, TargetPrecision(kernels="torch"), 200, lambda _: None)
    trainer.run(lambda _: None)
    card = json.loads((trainer.head_directory / "card.json").read_text())
    _, held_out = Corpus.open(corpus).split(config.held_out, config.seed)
    greedy = [each for each in held_out if each.temperature == 0]
    speculation = {
        "model": str(trainer.head_directory),
        "num_speculative_tokens": config.depth,
        "policy": "threshold",
    }
    num_drafts = num_accepted = 0
    with LLM(str(model_dir), speculative_config=speculation, **ENGINE) as llm:
        for sample in greedy:
            params = SamplingParams(temperature=0.0, max_tokens=len(sample.answer))
            prompt = list(sample.token_ids[: sample.num_prompt_tokens])
            [found] = llm.generate([prompt], params, use_tqdm=False)
            assert tuple(found.outputs[0].token_ids) == sample.answer
            num_drafts += found.speculation.num_drafts
            num_accepted += found.speculation.num_accepted_tokens
    predicted = card["held_out"]["accepted_length"]["0.0"]
    assert 1 + num_accepted / num_drafts == pytest.approx(predicted, rel=0.1)
    assert predicted > 1.2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa"])
def test_an_adapter_of_a_head_follows_the_adapter_of_the_target(
    method, model_dir, prompts, corpus, tmp_path
):
    num_layers = 2 if method == "dflash" else None
    config = dataclasses.replace(CONFIG, method=method, num_layers=num_layers)
    files = TrainingFiles(str(model_dir), (corpus,), tmp_path / "plain")
    precision = TargetPrecision(kernels="torch")
    first = open_run(files, config, precision, 200, lambda _: None)
    first.run(lambda _: None)
    target = adapter_dir(tmp_path / "target", model_dir, gain=0.5)
    generation = GenerationConfig(
        str(model_dir), str(target), max_new_tokens=32, temperatures=(0.0, 0.8), engine=ENGINE
    )
    generate_corpus(generation, prompts, tmp_path / "corpus")
    files = TrainingFiles(
        str(model_dir),
        (tmp_path / "corpus",),
        tmp_path / "adapted",
        start=first.head_directory,
        adapter=target,
    )
    config = dataclasses.replace(config, lora_rank=8)
    with pytest.raises(InvalidValueError, match="draft_vocab_size is 200; it must be left out"):
        open_run(files, config, precision, 200, lambda _: None)
    second = open_run(files, config, precision, None, lambda _: None)
    second.run(lambda _: None)
    _, held_out = Corpus.open(tmp_path / "corpus").split(config.held_out, config.seed)
    asked = [list(each.token_ids[: each.num_prompt_tokens]) for each in held_out[:8]]
    drafts = {"": "", "adapted": str(second.head_directory)}
    found = [
        serve(model_dir, asked, head, LoRARequest("a", 1, str(target), draft))
        for head, draft in ((None, ""), *((first.head_directory, each) for each in drafts.values()))
    ]
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[2][1] > 1.1 * found[1][1], found
    files = dataclasses.replace(files, adapter=None)
    with pytest.raises(InvalidValueError, match="that which answered"):
        open_run(files, config, precision, None, lambda _: None)
    files = dataclasses.replace(files, adapter=target, start=None)
    with pytest.raises(InvalidValueError, match="the head that the adapter is of"):
        open_run(files, config, precision, None, lambda _: None)


def test_the_answers_of_all_corpora_are_of_one_teacher(model_dir, corpus, prompts, tmp_path):
    adapters = [adapter_dir(tmp_path / f"adapter{i}", model_dir, seed=i) for i in range(2)]
    adapted = [tmp_path / "of0", tmp_path / "of1"]
    for adapter, directory in zip(adapters, adapted, strict=True):
        generation = GenerationConfig(str(model_dir), str(adapter), max_new_tokens=2, engine=ENGINE)
        generate_corpus(generation, prompts[:2], directory)
    config = TrainingConfig(method="medusa", lora_rank=2)
    for corpora, adapter, wrong in (
        ((corpus, adapted[0]), None, adapted[0]),
        ((corpus, adapted[0]), adapters[0], corpus),
        (tuple(adapted), adapters[0], adapted[1]),
        ((adapted[1], adapted[1]), adapters[0], adapted[1]),
    ):
        files = TrainingFiles(str(model_dir), corpora, tmp_path / "run", adapter=adapter)
        with pytest.raises(InvalidValueError, match=f"that which answered in {wrong}, if any"):
            open_run(files, config, TargetPrecision(), None, lambda _: None)


def test_every_method_has_a_run(model_dir, corpus, tmp_path):
    for method in TRAINED_METHODS:
        config = TrainingConfig(method=method, depth=2, batch_tokens=4096, evaluate_every=1)
        files = TrainingFiles(str(model_dir), (corpus,), tmp_path / method, num_samples=12)
        precision = TargetPrecision(kernels="torch")
        trainer = open_run(files, config, precision, None, lambda _: None)
        trainer.run(lambda _: None)
        assert (trainer.head_directory / "model.safetensors").is_file()


def test_a_run_starts_from_a_head_of_its_settings(model_dir, corpus, tmp_path):
    config = TrainingConfig(depth=2, batch_tokens=4096, num_epochs=1)
    files = TrainingFiles(str(model_dir), (corpus,), tmp_path / "first", num_samples=12)
    precision = TargetPrecision(kernels="torch")
    first = open_run(files, config, precision, 200, lambda _: None)
    first.run(lambda _: None)
    head = first.head_directory
    files = dataclasses.replace(files, output=tmp_path / "second", start=head)
    second = open_run(files, config, precision, 150, lambda _: None)
    second.run(lambda _: None)
    second.export()
    card = json.loads((second.head_directory / "card.json").read_text())
    content = (head / "model.safetensors").read_bytes()
    assert card["start_sha256"] == hashlib.sha256(content).hexdigest()
    other = dataclasses.replace(config, method="medusa")
    with pytest.raises(InvalidValueError, match="method is 'medusa'"):
        open_run(files, other, precision, 200, lambda _: None)
