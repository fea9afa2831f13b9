"""`specdec train` on the tiny model."""

import dataclasses
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from cluster.cli import main
from cluster.cli.output import print_stderr
from cluster.cli.training.train import Reporter, _corpus, _warn_of_short_drafts, progress_line
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import method_of
from specdec.models.lora.peft import AdapterFiles
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import model_fingerprint
from specdec.training.acceptance import Acceptance
from specdec.training.atomic_files import sole_writer
from specdec.training.checkpoint import Checkpoint
from specdec.training.data import generation
from specdec.training.data.corpus import Corpus, CorpusInfo, CorpusWriter, Sample
from specdec.training.drafters.base import TRAINED_METHODS
from specdec.training.trainer import Evaluation, Progress
from specdec.types.errors import InvalidValueError
from tests.clock import Clock
from tests.specdec.adapters import adapter_dir

EVALUATION = Evaluation(7, {0.0: Acceptance(10, 15, (8, 4), (10, 9))})
PROGRESS = Progress(7, 20, 1.25, 812.4, 3723.0, None)


@pytest.fixture
def corpus(tiny_model_dir, tmp_path):
    fingerprint = model_fingerprint(tiny_model_dir)
    info = CorpusInfo("tiny", fingerprint, 383, "", "float32", "none")
    samples = [Sample(tuple(range(3 + n, 27 + n)), 6, 0.0) for n in range(10)]
    with CorpusWriter(tmp_path / "corpus", info) as writer:
        writer.add(samples, range(10))
    return tmp_path / "corpus"


@pytest.fixture
def train(tiny_model_dir, corpus, tmp_path):
    def run(*arguments):
        return invoke(tiny_model_dir, tmp_path / "run", "--corpus", corpus, *arguments)

    return run


def test_a_run_in_use_is_refused_in_one_line(train, tmp_path):
    with sole_writer(tmp_path / "run" / ".run.lock", "trains in"):
        result = train()
    assert result.exit_code == 1
    line = f"error: another process trains in {tmp_path / 'run'}"
    assert result.stderr.splitlines()[-1] == line


def invoke(model, output, *arguments):
    fixed = ["train", model, output, "--threads", 1]
    small = ["--depth", 2, "--num-epochs", 2, "--batch-tokens", 64, "--held-out", 0.2]
    return CliRunner().invoke(main.main, list(map(str, [*fixed, *small, *arguments])))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(f"When will river {n} open?") for n in range(8)))
    return path


def test_one_command_makes_the_answers_and_a_head(tiny_model_dir, prompts, tmp_path, monkeypatch):
    flags = ["--prompts", prompts, "--max-new-tokens", 6, "--max-num-seqs", 4, "--seed", 3]
    result = invoke(tiny_model_dir, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "head" / "model.safetensors").is_file()
    corpus = Corpus.open(tmp_path / "run" / "corpus")
    assert len(corpus) == 8
    assert corpus.info.plan["seed"] == 3
    # A run is tied to its samples: the corpus does not change after the first checkpoint.
    monkeypatch.setattr(generation, "generate_corpus", lambda *_: pytest.fail("answers again"))
    again = invoke(tiny_model_dir, tmp_path / "run", *flags)
    assert again.exit_code == 0, again.output
    assert "continuing after step" in again.stderr


@pytest.mark.parametrize(
    ("flags", "expected"), [((), 4000), (("--num-self-written", 5), 5), (("--prompts",), 0)]
)
def test_without_a_prompts_file_the_model_writes_prompts(
    flags, expected, tiny_model_dir, prompts, tmp_path, monkeypatch
):
    seen = []

    def generate(config, records, directory):
        seen.append((config.num_self_written, len(records), config.quantization))
        raise InvalidValueError("prompts", "none", "enough")

    monkeypatch.setattr(generation, "generate_corpus", generate)
    given = [*flags, prompts] if flags == ("--prompts",) else flags
    result = invoke(tiny_model_dir, tmp_path / "run", "--quantization", "int8", *given)
    assert result.exit_code == 1
    assert seen == [(expected, 8 if "--prompts" in flags else 0, "int8")]


def test_a_gpu_with_a_number_continues_a_run_and_begins_none_without_answers(tmp_path):
    gpu = torch.device("cuda", 1)
    with pytest.raises(InvalidValueError, match="device is 'cuda:1'; it must be cuda without"):
        _corpus("m", tmp_path, gpu, {})
    (tmp_path / "checkpoint.safetensors").touch()
    assert _corpus("m", tmp_path, gpu, {}) == tmp_path / "corpus"


def test_the_help_names_all_methods():
    text = CliRunner().invoke(main.main, ["train", "--help"]).output
    assert all(method in text for method in TRAINED_METHODS)


def test_flags_of_answers_are_refused_where_there_are_answers(train, prompts):
    for flags in (["--prompts", prompts], ["--num-self-written", 5], ["--max-new-tokens", 9]):
        result = train(*flags)
        assert result.exit_code == 1
        assert "left out with --corpus" in result.stderr


def test_a_run_ends_with_a_head_and_is_not_repeated(train, tmp_path):
    result = train("--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["head"] == str(tmp_path / "run" / "head")
    length = content["best_accepted_length"]
    assert length >= 1
    assert f"warning: the held-out acceptance length is {length:.2f}; below 2" in result.stderr
    card = json.loads((tmp_path / "run" / "head" / "card.json").read_text())
    assert card["target"] == "tiny"
    assert card["training"]["depth"] == 2
    assert "samples with" in result.stderr
    assert "acceptance length" in result.stderr
    again = train()
    assert again.exit_code == 0, again.output
    assert f"continuing after step {content['step']}" in again.stderr
    assert again.stdout.strip() == content["head"]


def test_an_adapter_of_a_head_follows_that_of_the_target(tiny_model_dir, train, prompts, tmp_path):
    head, adapter = train().stdout.strip(), adapter_dir(tmp_path / "adapter", tiny_model_dir)
    flags = ["--adapter", adapter, "--prompts", prompts, "--max-new-tokens", 8]
    flags += ["--learning-rate", 0.02, "--evaluate-every", 1]
    result = invoke(tiny_model_dir, tmp_path / "adapted", *flags)
    assert result.exit_code == 1
    assert "start is None; it must be given: the head that the adapter is of" in result.stderr
    assert not (tmp_path / "adapted").exists(), "it fails before there are answers"
    flags += ["--start", head]
    result = invoke(tiny_model_dir, tmp_path / "adapted", *flags, "--draft-vocab-size", 100)
    assert result.exit_code == 1
    assert "draft_vocab_size is 100; it must be left out: an adapter has the" in result.stderr
    assert not (tmp_path / "adapted").exists(), "it fails before there are answers"
    result = invoke(tiny_model_dir, tmp_path / "adapted", *flags, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["adapter"] == str(tmp_path / "adapted" / "adapter")
    state = Checkpoint.load(tmp_path / "adapted")
    assert state.run["lora_rank"] == 16
    assert state.run["adapter"] == AdapterFiles.read(adapter).fingerprint
    info = Corpus.open(tmp_path / "adapted" / "corpus").info
    assert info.plan["adapter_sha256"] == state.run["adapter"]


@pytest.mark.parametrize(("layout", "num_layers"), [("published", 1), ("packed", 1), ("packed", 2)])
def test_a_draft_model_is_exported_in_the_layout_and_size_that_is_asked_for(
    layout, num_layers, train, tmp_path
):
    flags = ["--method", "draft_model", "--num-layers", num_layers, "--export-layout", layout]
    result = train(*flags, "--num-epochs", 1)
    assert result.exit_code == 0, result.output
    head = tmp_path / "run" / "head"
    is_packed = layout == "packed"
    assert (head / "packed.safetensors").is_file() == is_packed
    assert (head / "model.safetensors").is_file() != is_packed
    assert (head / "tokenizer.json").is_file() != is_packed
    directory = resolve(str(head), tmp_path / "cache", lambda _: None)
    assert (directory == head) != is_packed
    assert ModelConfig.from_directory(directory).num_layers == num_layers
    assert method_of(directory) == "draft_model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--method", "psychic"],
            "'psychic'; it must be one of dflash, draft_model, dspark, eagle3",
        ),
        (
            ["--num-layers", 2],
            "num_layers is 2; it must be left out: it is of dspark, dflash, draft",
        ),
        (["--markov-rank", 5], "markov_rank is 5; it must be left out: it is of dspark, and the"),
        (["--depth", 40], "depth is 40; it must be from 1 to 16"),
        (["--num-samples", 11], "has 10 samples so far; 11 are needed"),
        (["--draft-vocab-size", 1], "draft_vocab_size is 1; it must be from"),
        (["--draft-vocab-size", 384], "draft_vocab_size is 384; it must be from"),
        (["--method", "mlp_speculator", "--draft-vocab-size", 99], "has no draft vocabulary"),
    ],
)
def test_errors_are_one_line(train, arguments, message):
    result = train(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_sizes_of_a_block_drafter_follow_the_flags(train, tmp_path):
    flags = ["--method", "dspark", "--num-layers", 1, "--markov-rank", 5, "--markov-head", "rnn"]
    result = train(*flags, "--max-anchors", 4, "--num-epochs", 1)
    assert result.exit_code == 0, result.output
    head = tmp_path / "run" / "head"
    config = json.loads((head / "config.json").read_text())
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert (config["markov_rank"], config["markov_head_type"]) == (5, "rnn")
    assert json.loads((head / "card.json").read_text())["training"]["max_anchors"] == 4


@pytest.mark.parametrize("flags", [("--draft-vocab-size", 1), ("--method", "mlp_speculator")])
def test_a_bad_draft_vocabulary_is_refused_before_there_are_answers(
    flags, tiny_model_dir, prompts, tmp_path, monkeypatch
):
    monkeypatch.setattr(generation, "generate_corpus", lambda *_: pytest.fail("answers first"))
    size = () if "--draft-vocab-size" in flags else ("--draft-vocab-size", 99)
    result = invoke(tiny_model_dir, tmp_path / "run", "--prompts", prompts, *flags, *size)
    assert result.exit_code == 1
    assert "draft_vocab_size is" in result.stderr


@pytest.mark.parametrize(("limit", "dtype"), [(1, "bfloat16"), (3, "float32")])
def test_the_held_out_samples_and_the_exported_type_follow_the_flags(limit, dtype, train, tmp_path):
    flags = ["--held-out", 0.5, "--max-held-out-samples", limit, "--export-dtype", dtype]
    result = train(*flags, "--num-epochs", 1)
    assert result.exit_code == 0, result.output
    head = tmp_path / "run" / "head"
    assert json.loads((head / "card.json").read_text())["num_evaluated_samples"] == limit
    assert load_file(head / "model.safetensors")["fc.weight"].dtype == getattr(torch, dtype)


def test_a_corpus_of_another_model_is_rejected(tiny_model_dir, corpus, train):
    path = corpus / "corpus.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"target_hash": "0" * 64}))
    result = train()
    assert result.exit_code == 1
    assert f"it must be tiny, which answered in {corpus}" in result.stderr


@pytest.mark.parametrize(("length", "is_warned"), [(1.99, True), (2.0, False)])
def test_only_a_short_acceptance_length_is_warned_of(length, is_warned, capsys):
    _warn_of_short_drafts(SimpleNamespace(best=length))
    assert ("specdec eval-drafter" in capsys.readouterr().err) == is_warned


def test_progress_has_loss_speed_and_time_left():
    assert progress_line(PROGRESS) == "step 7/20  loss 1.250  812 tokens/s  1:02:03 left"


def test_a_log_has_a_line_each_half_minute_and_each_evaluation():
    clock, lines = Clock(), []
    report = Reporter(clock, lines.append)
    for _ in range(3):
        clock.now_s += 20
        report(PROGRESS)
    assert len(lines) == 1  # after 40 seconds
    report(dataclasses.replace(PROGRESS, evaluation=EVALUATION))
    assert lines[1].endswith("acceptance length 2.50")
    assert lines[2] == ("  held out, temperature 0: acceptance length 2.50, by position 0.80 0.44")


def test_on_a_terminal_each_line_replaces_the_one_before(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = Clock()
    report = Reporter(clock, print_stderr)
    evaluated = dataclasses.replace(PROGRESS, step=8, evaluation=EVALUATION)
    for progress in (PROGRESS, evaluated, dataclasses.replace(evaluated, step=9)):
        clock.now_s += 2
        report(progress)
    assert terminal.getvalue().split("\r\x1b[K") == [
        "",
        progress_line(PROGRESS),
        f"{progress_line(evaluated)}\n  held out, temperature 0: acceptance length 2.50, "
        "by position 0.80 0.44\n",
        progress_line(dataclasses.replace(evaluated, step=9)),
    ]
