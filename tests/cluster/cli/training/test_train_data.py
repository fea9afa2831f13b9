"""`specdec train-data` on the tiny model."""

import json
import signal

import pytest
from click.testing import CliRunner

from cluster.cli import main
from specdec.training.data import generation
from specdec.training.data.corpus import Corpus


@pytest.fixture
def make(tiny_model_dir, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [f"When will river {n} open?"]}) for n in range(3)]
    prompts.write_text("\n".join(lines))

    def run(*arguments):
        fixed = ["train-data", tiny_model_dir, tmp_path / "corpus", "--prompts", prompts]
        given = [*fixed, "--max-num-seqs", 2, "--max-new-tokens", 4, *arguments]
        return CliRunner().invoke(main.main, list(map(str, given)))

    return run


def test_a_corpus_is_made_and_extended(make, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    result = make("--temperatures", "0,0.5", "--json")
    assert result.exit_code == 0, result.output
    corpus = Corpus.open(tmp_path / "corpus")
    assert json.loads(result.stdout) == {
        "corpus": str(tmp_path / "corpus"),
        "num_samples": 3,
        "num_answer_tokens": corpus.num_answer_tokens,
        "num_skipped": 0,
    }
    assert set(corpus.temperatures) <= {0.0, 0.5}
    assert max(len(each.answer) for each in corpus) <= 4
    result = make("--temperatures", "0,0.5", "--answers-per-prompt", 2)
    assert result.stdout.strip() == str(tmp_path / "corpus")
    assert "3 new samples with " in result.stderr
    assert "0 requests without one" in result.stderr
    assert " requests/s" in result.stderr
    assert len(Corpus.open(tmp_path / "corpus")) == 6
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_exits_with_the_code_of_the_signal(make, monkeypatch, number, code):
    def interrupt(*_):
        signal.raise_signal(number)

    monkeypatch.setattr(generation, "generate_corpus", interrupt)
    result = make()
    assert (result.exit_code, result.output) == (code, "")


def test_other_settings_are_refused_in_one_line(make):
    assert make("--seed", 1).exit_code == 0
    result = make("--seed", 2)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: seed is 2; it must be 1, as in")


def test_a_run_without_prompts_is_refused(tiny_model_dir, tmp_path):
    flags = ["train-data", str(tiny_model_dir), str(tmp_path), "--num-self-written", "0"]
    result = CliRunner().invoke(main.main, flags)
    assert result.exit_code == 1
    assert "num_self_written above 0" in result.stderr
