"""Generation of a corpus on the tiny model: samples as served, progress, resumption."""

import multiprocessing
import shutil
import time
from dataclasses import replace

import pytest

from specdec import LLM, SamplingParams
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer
from specdec.training.data import generation
from specdec.training.data.corpus import Corpus, CorpusWriter, Sample
from specdec.training.data.generation import (
    GenerationConfig,
    ShardBuffer,
    generate_corpus,
    plan_requests,
)
from specdec.training.data.prompts import PromptRecord
from specdec.types.errors import InvalidValueError, TargetFailedError
from tests.clock import Clock
from tests.specdec.training.data.test_corpus import INFO

PROMPTS = [PromptRecord((f"When will river {number} open?",)) for number in range(5)]
TWO_TURNS = [PromptRecord(("Ask the baker", "And the children?"))]


@pytest.fixture
def config(tiny_model_dir):
    engine = {"kernels": "torch", "kv_cache_memory_gib": 0.05}
    return GenerationConfig(str(tiny_model_dir), max_new_tokens=8, max_num_seqs=4, engine=engine)


def by_prompt(corpus):
    return sorted(corpus, key=lambda sample: sample.token_ids)


def test_the_plan_mixes_temperatures_and_keeps_a_request_when_it_grows(config):
    many = PROMPTS * 40
    plan = plan_requests(many, config)
    assert [each.number for each in plan] != sorted(each.number for each in plan)
    counts = [sum(each.temperature == t for each in plan) for t in config.temperatures]
    # Binomial with n = 200 and p = 1/4: outside of 50 +- 30 once in a million for each.
    assert all(20 <= count <= 80 for count in counts), counts
    assert len({each.seed for each in plan}) == len(plan)
    larger = plan_requests(many, replace(config, answers_per_prompt=2, num_self_written=3))
    assert len(larger) == 403
    assert set(plan) < set(larger)
    assert {each.number for each in larger if each.turns is None} == {-1, -2, -3}


def test_samples_are_the_answers_that_are_served(config, tmp_path):
    progress = generate_corpus(config, PROMPTS, tmp_path)
    corpus = Corpus.open(tmp_path)
    assert (progress.num_samples, progress.num_skipped, len(corpus)) == (5, 0, 5)
    assert progress.num_answer_tokens == corpus.num_answer_tokens
    requests = {each.turns: each for each in plan_requests(PROMPTS, config)}
    tokenizer = Tokenizer(resolve(config.model))
    with LLM(config.model, speculative_config=None) as llm:
        for record in PROMPTS:
            request = requests[record.turns]
            params = SamplingParams(
                temperature=request.temperature, max_tokens=8, seed=request.seed
            )
            [served] = llm.chat([{"role": "user", "content": record.turns[0]}], params, False)
            [sample] = [
                s
                for s in corpus
                if list(s.token_ids[: s.num_prompt_tokens]) == served.prompt_token_ids
            ]
            assert list(sample.answer) == served.outputs[0].token_ids
            assert sample.temperature == request.temperature
            assert record.turns[0] in tokenizer.decode(sample.token_ids)
    assert corpus.info.chat_template == tokenizer.chat_template.text
    assert corpus.info.vocab_size == 383


def test_each_answer_of_a_conversation_is_a_sample(config, tmp_path):
    generate_corpus(config, TWO_TURNS, tmp_path)
    first, second = Corpus.open(tmp_path)
    assert first.num_prompt_tokens < len(first.token_ids) < second.num_prompt_tokens
    text = Tokenizer(resolve(config.model)).decode(second.token_ids[: second.num_prompt_tokens])
    assert "Ask the baker" in text
    assert "And the children?" in text


@pytest.mark.parametrize("end", [KeyboardInterrupt, TargetFailedError])
def test_a_run_continues_where_it_ended(config, tmp_path, monkeypatch, end):
    monkeypatch.setattr(generation, "_SAMPLES_PER_SHARD", 1)
    generate_corpus(config, PROMPTS, tmp_path / "whole")
    whole = by_prompt(Corpus.open(tmp_path / "whole"))

    real, calls = generation.Conversations.run, []

    async def run(self, request):
        calls.append(request)
        if len(calls) > 2:
            raise end
        return await real(self, request)

    monkeypatch.setattr(generation.Conversations, "run", run)
    with pytest.raises(end):
        generate_corpus(replace(config, max_num_seqs=1), PROMPTS, tmp_path / "parts")
    assert 0 < len(Corpus.open(tmp_path / "parts")) < 5
    monkeypatch.setattr(generation.Conversations, "run", real)
    generate_corpus(config, PROMPTS, tmp_path / "parts")
    assert by_prompt(Corpus.open(tmp_path / "parts")) == whole
    assert generate_corpus(config, PROMPTS, tmp_path / "parts").num_requests == 0


def test_a_later_run_adds_answers(config, tmp_path):
    generate_corpus(config, PROMPTS, tmp_path)
    before = list(Corpus.open(tmp_path))
    progress = generate_corpus(replace(config, answers_per_prompt=2), PROMPTS, tmp_path)
    assert progress.num_requests == 5
    after = list(Corpus.open(tmp_path))
    assert after[:5] == before
    assert len(after) == 10
    with pytest.raises(InvalidValueError, match="prompts_sha256"):
        generate_corpus(config, PROMPTS[:2], tmp_path)


def test_a_prompt_beyond_the_context_is_skipped(config, tmp_path):
    long = PromptRecord(("water " * 600,))
    progress = generate_corpus(config, [long, *PROMPTS], tmp_path)
    assert (progress.num_samples, progress.num_skipped) == (5, 1)
    assert generate_corpus(config, [long, *PROMPTS], tmp_path).num_requests == 0


def test_what_no_prompt_can_have_ends_the_run(config, tmp_path):
    with pytest.raises(InvalidValueError, match="max_new_tokens is 512; it must be from 1 to 511"):
        generate_corpus(replace(config, max_new_tokens=512), PROMPTS, tmp_path / "long")
    directory = tmp_path / "model"
    shutil.copytree(config.model, directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(InvalidValueError, match="the model has no chat template"):
        generate_corpus(replace(config, model=str(directory)), PROMPTS, tmp_path / "bare")
    assert len(CorpusWriter(tmp_path / "long", Corpus.open(tmp_path / "long").info).requests) == 0


def test_nothing_to_answer_is_refused(config, tmp_path):
    with pytest.raises(InvalidValueError, match="num_self_written"):
        generate_corpus(config, [], tmp_path)


def test_samples_are_stored_when_they_are_many_or_old(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "_SAMPLES_PER_SHARD", 3)
    clock, sizes = Clock(), []
    with CorpusWriter(tmp_path, INFO) as writer:
        buffer = ShardBuffer(writer, clock)
        for number, wait_s in enumerate([0, 1, 1, 1, 58, 2, 59]):
            clock.now_s += wait_s
            buffer.add([Sample((1, 2), 1, 0.0)], number)
            sizes.append(len(writer.requests))
    assert sizes == [0, 0, 3, 3, 3, 6, 6]


def test_requests_without_a_sample_are_stored_with_the_next_shard(tmp_path):
    with CorpusWriter(tmp_path, INFO) as writer:
        buffer = ShardBuffer(writer, Clock())
        buffer.add([], -1)
        buffer.add([Sample((1, 2), 1, 0.0)], -2)
        buffer.flush()
        buffer.add([], -3)
        buffer.flush()
    assert len(Corpus.open(tmp_path)) == 1
    with CorpusWriter(tmp_path, INFO) as writer:
        assert writer.requests == {-1, -2, -3}


@pytest.mark.slow
def test_a_run_that_is_killed_is_continued(config, tmp_path):
    prompts = [PromptRecord((f"When will river {number} open?",)) for number in range(40)]
    generate_corpus(config, prompts, tmp_path / "whole")
    killed = tmp_path / "killed"
    process = multiprocessing.get_context("spawn").Process(
        target=generate_shards_of_two, args=(config, prompts, killed)
    )
    process.start()
    while process.is_alive() and len(list(killed.glob("shard-*"))) < 3:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert len(Corpus.open(killed)) >= 6
    generate_corpus(config, prompts, killed)
    assert by_prompt(Corpus.open(killed)) == by_prompt(Corpus.open(tmp_path / "whole"))


def generate_shards_of_two(config, prompts, directory):
    generation._SAMPLES_PER_SHARD = 2
    generate_corpus(config, prompts, directory)


def test_a_gpu_answers_more_conversations_in_fewer_bits():
    cpu, gpu = (GenerationConfig("m", device=device).llm_arguments() for device in ("cpu", "cuda"))
    names = ("device", "dtype", "max_num_seqs", "max_num_batched_tokens")
    assert [cpu[name] for name in names] == ["cpu", "float32", 64, 256]
    assert [gpu[name] for name in names] == ["cuda", "bfloat16", 256, 8192]
    own = GenerationConfig("m", device="cuda", dtype="float16", max_num_seqs=512, kernels="torch")
    found = own.llm_arguments()
    assert [found[name] for name in names] == ["cuda", "float16", 512, 8192]
    assert found["kernels"] == "torch"
