# Modules: specdec.training.atomic_files
"""A corpus: what is stored comes back, a reader sees whole shards, and a writer can be killed."""

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from specdec.training.atomic_files import DirectoryInUseError, write_atomically
from specdec.training.data.corpus import (
    Corpus,
    CorpusError,
    CorpusInfo,
    CorpusWriter,
    Sample,
    read_info,
    shard_paths,
)
from specdec.types.errors import InvalidValueError

INFO = CorpusInfo(
    target="tiny",
    target_hash="ab",
    vocab_size=383,
    chat_template="{{ messages }}",
    dtype="float32",
    quantization="int8",
    plan={"temperatures": [0.0, 0.7], "seed": 0},
)


def sample(number: int, temperature: float = 0.7) -> Sample:
    """Return a sample whose prompt is its own, with an answer of 1 to 5 tokens."""
    answer = range(1 + number % 5)
    return Sample((7, number, *answer), 2, temperature)


def write(directory, *shards, info=INFO):
    with CorpusWriter(directory, info) as writer:
        for numbers in shards:
            writer.add([sample(each) for each in numbers], numbers)


def test_samples_come_back_in_the_order_in_which_they_were_added(tmp_path):
    write(tmp_path, [3, 1], [2], [7, 5, 4])
    corpus = Corpus.open(tmp_path)
    assert list(corpus) == [sample(each) for each in (3, 1, 2, 7, 5, 4)]
    assert corpus[-1] == sample(4)
    assert list(corpus[1:3]) == [sample(1), sample(2)]
    assert corpus.info == INFO
    assert corpus.num_tokens == sum(len(each.token_ids) for each in corpus)
    assert corpus.num_answer_tokens == corpus.num_tokens - 2 * len(corpus)
    assert corpus[0].answer == (0, 1, 2, 3)
    with pytest.raises(IndexError):
        corpus[6]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0])
def test_a_temperature_comes_back_exactly(tmp_path, temperature):
    with CorpusWriter(tmp_path, INFO) as writer:
        writer.add([sample(0, temperature)], [0])
    assert Corpus.open(tmp_path)[0].temperature == temperature
    assert Corpus.open(tmp_path).temperatures == (temperature,)


def test_a_reader_keeps_its_view_while_the_corpus_grows(tmp_path):
    with CorpusWriter(tmp_path, INFO) as writer:
        assert len(Corpus.open(tmp_path)) == 0
        writer.add([sample(0)], [0])
        early = Corpus.open(tmp_path)
        writer.add([sample(1)], [1])
        assert list(early) == [sample(0)]
        assert list(Corpus.open(tmp_path)) == [sample(0), sample(1)]


def test_a_later_writer_continues_the_corpus(tmp_path):
    write(tmp_path, [0, 1])
    with CorpusWriter(tmp_path, INFO) as writer:
        assert writer.requests == {0, 1}
        writer.add([sample(9)], [9])
        writer.add([], [])
        assert writer.requests == {0, 1, 9}
    assert [path.name for path in shard_paths(tmp_path)] == [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert list(Corpus.open(tmp_path)) == [sample(0), sample(1), sample(9)]


def test_a_file_that_a_killed_writer_left_is_ignored(tmp_path):
    write(tmp_path, [0])
    [shard] = shard_paths(tmp_path)
    (tmp_path / ".shard-00001.safetensors.tmp").write_bytes(shard.read_bytes()[:40])
    write(tmp_path, [1])
    assert list(Corpus.open(tmp_path)) == [sample(0), sample(1)]


def test_two_writers_at_once_are_refused(tmp_path):
    with CorpusWriter(tmp_path, INFO), pytest.raises(DirectoryInUseError, match="another process"):
        CorpusWriter(tmp_path, INFO)
    write(tmp_path, [0])


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("target_hash", replace(INFO, target_hash="cd")),
        ("quantization", replace(INFO, quantization="none")),
        ("temperatures", replace(INFO, plan={"temperatures": [1.0], "seed": 0})),
        ("seed", replace(INFO, plan={"temperatures": [0.0, 0.7]})),
    ],
)
def test_a_corpus_of_other_settings_is_not_continued(tmp_path, field, other):
    write(tmp_path, [0])
    with pytest.raises(InvalidValueError, match=field):
        CorpusWriter(tmp_path, other)
    write(tmp_path, [1])  # the writer that was refused holds no lock


def test_invalid_files_are_reported(tmp_path):
    with pytest.raises(CorpusError, match="is not a corpus"):
        Corpus.open(tmp_path)
    (tmp_path / "corpus.json").write_text("[" * 9000)
    with pytest.raises(CorpusError, match="is not a corpus"):
        read_info(tmp_path)
    (tmp_path / "corpus.json").unlink()
    write(tmp_path, [0])
    [shard] = shard_paths(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(CorpusError, match="is not a shard"):
        Corpus.open(tmp_path)
    shard.write_bytes(content)
    info = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps(info | {"format": 9}))
    with pytest.raises(CorpusError, match="format 9"):
        read_info(tmp_path)


@pytest.mark.parametrize("broken", [Sample((1, 2), 2, 0.0), Sample((1, 2), 0, 0.0)])
def test_a_sample_without_a_prompt_or_an_answer_is_reported(tmp_path, broken):
    with CorpusWriter(tmp_path, INFO) as writer:
        writer.add([broken], [0])
    with pytest.raises(CorpusError, match="without a prompt or an answer"):
        Corpus.open(tmp_path)


def test_a_split_is_disjoint_and_near_the_share(tmp_path):
    write(tmp_path, list(range(1000)))
    corpus = Corpus.open(tmp_path)
    train, held_out = corpus.split(0.1, seed=1)
    assert sorted(s.token_ids[1] for part in (train, held_out) for s in part) == list(range(1000))
    # Binomial with n = 1000 and p = 0.1: outside of 100 +- 50 once in ten million seeds.
    assert 50 <= len(held_out) <= 150
    again = corpus.split(0.1, seed=1)[1]
    assert list(again) == list(held_out)
    assert list(corpus.split(0.1, seed=2)[1]) != list(held_out)


def test_a_sample_stays_on_its_side_while_the_corpus_grows(tmp_path):
    write(tmp_path, list(range(200)))
    early = Corpus.open(tmp_path).split(0.2, seed=0)
    write(tmp_path, list(range(200, 400)))
    late = Corpus.open(tmp_path).split(0.2, seed=0)
    for before, after in zip(early, late, strict=True):
        assert list(before) == list(after)[: len(before)]


def test_answers_to_one_prompt_are_on_one_side(tmp_path):
    with CorpusWriter(tmp_path, INFO) as writer:
        both = [Sample((7, n, answer), 2, 0.0) for n in range(100) for answer in (1, 2)]
        writer.add(both, list(range(200)))
    for part in Corpus.open(tmp_path).split(0.3, seed=0):
        prompts, counts = np.unique([s.token_ids[1] for s in part], return_counts=True)
        assert len(prompts)
        assert set(counts) == {2}


def test_turns_of_a_conversation_are_on_one_side(tmp_path):
    first = [Sample((7, n, 1), 2, 0.0) for n in range(100)]
    second = [Sample((*each.token_ids, 8, n), 4, 0.0) for n, each in enumerate(first)]
    with CorpusWriter(tmp_path, INFO) as writer:
        turns = [each for pair in zip(first, second, strict=True) for each in pair]
        writer.add(turns, [n for n in range(100) for _ in range(2)])
    corpus = Corpus.open(tmp_path)
    for part in (corpus, corpus[1::2]):
        train, held_out = part.split(0.3, seed=0)
        sides = [{s.token_ids[1] for s in side} for side in (train, held_out)]
        assert all(sides)
        assert not sides[0] & sides[1]
    assert {s.token_ids[1] for s in corpus.split(0.3, seed=0)[1]} == sides[1]


def test_a_small_corpus_holds_out_one_prompt_and_a_share_of_zero_none(tmp_path):
    write(tmp_path, [0, 1])
    corpus = Corpus.open(tmp_path)
    assert tuple(map(len, corpus.split(0.001, seed=0))) == (1, 1)
    assert tuple(map(len, corpus.split(0, seed=0))) == (2, 0)
    with pytest.raises(InvalidValueError, match="held_out"):
        corpus.split(1, seed=0)
    with pytest.raises(InvalidValueError, match="two different prompts"):
        corpus[:1].split(0.5, seed=0)


def test_corpora_of_one_target_are_joined(tmp_path):
    other = replace(INFO, quantization="w8a8", plan={"seed": 9})
    for name, info, values in (("a", INFO, (0, 1)), ("b", other, (2,))):
        with CorpusWriter(tmp_path / name, info) as writer:
            for value in values:
                writer.add([sample(value)], [value])
    parts = [Corpus.open(tmp_path / name) for name in "ab"]
    joined = Corpus.join(parts)
    assert list(joined) == [sample(0), sample(1), sample(2)]
    first, second = joined.info.plan["corpora"]
    assert first == {"dtype": INFO.dtype, "quantization": INFO.quantization, **INFO.plan}
    assert (second["quantization"], second["seed"]) == ("w8a8", 9)
    assert list(Corpus.join([joined[1:]])) == [sample(1), sample(2)]


def test_corpora_of_different_targets_are_refused(tmp_path):
    for name, target_hash in (("a", INFO.target_hash), ("b", "0" * 64)):
        with CorpusWriter(tmp_path / name, replace(INFO, target_hash=target_hash)) as writer:
            writer.add([sample(0)], [0])
    with pytest.raises(InvalidValueError, match="target_hash"):
        Corpus.join([Corpus.open(tmp_path / name) for name in "ab"])


@pytest.mark.parametrize(("code", "is_without"), [(errno.ENOLCK, True), (errno.EACCES, False)])
def test_a_file_system_without_locks_ends_no_run(code, is_without, tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(FileLock, "acquire", fail)
    with nullcontext() if is_without else pytest.raises(PermissionError):
        write(tmp_path, [0])
    assert (f"{tmp_path} is not locked against" in caplog.text) is is_without


@pytest.mark.parametrize(
    ("failing_call", "error", "expected", "content"),
    [
        (1, OSError(errno.ENOSPC, "No space left"), r"No space left: '.*/file'", b"before"),
        (2, OSError(errno.EIO, "Input/output error"), r"Input/output error: '.*/file'", b"after"),
        (1, KeyboardInterrupt("stopped"), "stopped", b"before"),
    ],
    ids=["full disk", "directory", "Ctrl-C"],
)
@pytest.mark.parametrize("can_unlink", [True, False])
def test_a_failed_write_names_the_file_and_leaves_no_part(
    failing_call, error, expected, content, can_unlink, tmp_path, monkeypatch
):
    calls = iter((1, 2))

    def fsync(_):
        if next(calls) == failing_call:
            raise error

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "file"
    write_atomically(path, b"before")
    monkeypatch.setattr(os, "fsync", fsync)
    if not can_unlink:
        monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(type(error), match=expected):
        write_atomically(path, b"after")
    assert path.read_bytes() == content
    assert not can_unlink or list(tmp_path.iterdir()) == [path]
