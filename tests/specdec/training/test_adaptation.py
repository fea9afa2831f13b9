# Modules: specdec.training.warm_start
"""Training of a served head that is continued; tests/e2e has what it is worth on a service."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specdec.training.adaptation import Adaptation, TooFewTokensError, split
from specdec.training.data.corpus import Sample
from specdec.training.data.draft_vocabulary import special_tokens
from specdec.training.data.target_cache import CachedTarget
from specdec.training.drafters.base import TRAINED_METHODS, drafter_class
from specdec.training.export import export
from specdec.training.trainer import Data, Trainer
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import UnsupportedModelError
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.training import targets
from tests.specdec.training.targets import exported

CONFIG = replace(targets.CONFIG, held_out=0.5)
"""Twelve of 24 samples are held out, so that a better version is better beyond chance."""


def adaptation(target, output, config=CONFIG, min_held_out_tokens=1):
    target = CachedTarget(target.directory, 128, target.precision, max_bytes=2**24)
    return Adaptation(target, config, output, min_held_out_tokens)


def test_a_markov_head_without_a_kind_is_vanilla(target, samples, tmp_path):
    directory = exported("dspark", target, tmp_path / "run", samples).head_directory
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("markov_head_type") == "vanilla"
    path.write_text(json.dumps(config))
    assert ExportedHead(directory).settings["markov_head"] == "vanilla"


@pytest.mark.parametrize("method", sorted({*TRAINED_METHODS} - {"draft_model"}))
def test_an_exported_head_is_continued_with_its_weights(method, target, samples, tmp_path):
    trainer = exported(method, target, tmp_path / "run", samples)
    head = ExportedHead(trainer.head_directory)
    sizes = {} if method == "eagle3" else {"depth": 3}
    if method in ("dspark", "dflash"):
        sizes["num_layers"] = 1
    if method == "dspark":
        sizes |= {"markov_rank": 64, "markov_head": "vanilla"}
    assert head.settings == {"method": method, **sizes}
    ids = head.token_ids(target.config.vocab_size)
    assert ids == trainer.drafter.token_ids.tolist()
    again = drafter_class(method)(target, torch.tensor(ids), replace(CONFIG, **head.settings))
    head.copy_to(again)
    export(again, tmp_path / "again", "float32", {})
    stored = load_file(trainer.head_directory / "model.safetensors")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert tensor.equal(stored[name]), name


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa"])
def test_with_other_draft_tokens_the_common_rows_are_continued(method, target, samples, tmp_path):
    head = ExportedHead(exported(method, target, tmp_path, samples).head_directory)
    stored = head.token_ids(target.config.vocab_size)
    wanted = torch.arange(0, target.config.vocab_size, 3)
    torch.manual_seed(5)
    drafter = drafter_class(method)(target, wanted, replace(CONFIG, **head.settings))
    before = {name: each.clone() for name, each in drafter.tensors().items()}
    head.copy_to(drafter)
    names = {"lm_head.weight"} | ({"markov_head.markov_w2.weight"} if method == "dspark" else set())
    for name, tensor in drafter.tensors().items():
        if name not in names:
            assert not tensor.is_floating_point() or tensor.equal(head.tensors[name]), name
            continue
        places = {token_id: place for place, token_id in enumerate(stored)}
        common = [row for row, token_id in enumerate(wanted.tolist()) if token_id in places]
        assert tensor[common].equal(
            head.tensors[name][[places[int(wanted[row])] for row in common]]
        )
        others = [row for row in range(len(wanted)) if row not in common]
        fitted = fit(before[name][common], tensor[common], before[name][others])
        torch.testing.assert_close(tensor[others], fitted, rtol=1e-4, atol=1e-5)


def fit(source, result, others):
    """Return what a scale and a shift by column, fitted to pairs of rows, make of other rows."""
    columns = torch.eye(source.shape[1]).repeat(len(source), 1)
    inputs = torch.cat([source.reshape(-1, 1), columns], dim=1).double()
    outputs = result.reshape(-1, 1).double()
    found = torch.linalg.lstsq(inputs, outputs, driver="gelsd").solution.flatten().float()
    return found[0] * others + found[1:]


def test_a_head_that_was_not_trained_here_is_refused(target, samples, tmp_path):
    texts = [each.token_ids for each in samples]
    other = fitted_medusa_dir(target.directory, tmp_path / "head", texts)
    with pytest.raises(UnsupportedModelError, match="cannot be trained further: tensor"):
        adaptation(target, tmp_path).train(other, samples, lambda progress: None)
    assert not (tmp_path / ".training").exists()


def test_all_answers_to_a_prompt_are_on_one_side():
    samples = [Sample((prompt, 9, 9, answer), 2, 0.0) for prompt in range(500) for answer in (1, 2)]
    train, held_out = split(samples, 0.2, 0)
    assert len(train) + len(held_out) == 1000
    assert 110 <= len(held_out) <= 290, "5 standard deviations of 17.9, whatever the hash"
    assert not {each.token_ids[0] for each in train} & {each.token_ids[0] for each in held_out}
    assert split(samples, 0.2, 0) == (train, held_out)
    assert split(samples, 0.2, 1) != (train, held_out)


def test_a_prompt_keeps_its_side_while_others_come_and_go():
    samples = [Sample((prompt, 9, 9), 2, 0.0) for prompt in range(200)]
    early = split(samples[:120], 0.2, 0)
    late = split(samples[60:], 0.2, 0)
    for first, second in zip(early, late, strict=True):
        assert [each for each in first if each in samples[60:]] == [
            each for each in second if each in samples[:120]
        ]


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_of_two_prompts_one_is_held_out_and_of_one_none(held_out):
    samples = [Sample((prompt, 9, 9, answer), 2, 0.0) for prompt in (3, 4) for answer in (1, 2)]
    assert [len(side) for side in split(samples, held_out, 0)] == [2, 2]
    assert split(samples[:2], held_out, 0) == (samples[:2], [])


TINY = replace(CONFIG, learning_rate=1e-9)


def test_draft_tokens_alone_can_make_a_better_version(target, samples, tmp_path):
    head = exported("medusa", target, tmp_path / "run", samples).head_directory
    version = adaptation(target, tmp_path, TINY).train(head, samples, lambda progress: None)
    assert version.directory is not None
    assert version.after > version.before
    card = json.loads((version.directory / "card.json").read_text())
    assert card["held_out"]["mean_accepted_length"] == round(version.after, 4)
    assert card["num_evaluated_samples"] == len(split(samples, TINY.held_out, TINY.seed)[1])


@pytest.mark.parametrize("seed", range(4))
def test_draft_tokens_that_are_not_needed_make_no_better_version(target, samples, tmp_path, seed):
    """The head has all tokens of the held-out answers, which are at temperature 0.8."""
    own, others = known_and_other_tokens(target, samples)
    config = replace(TINY, method="medusa", seed=seed)
    Trainer(config, target, Data(samples[4:], samples[:4], own, {}), tmp_path / "run").export()
    warm = [replace(each, temperature=0.8) for each in samples]
    train, held_out = split(warm, config.held_out, seed)
    odd = replace(train[0], token_ids=(*train[0].token_ids, *others))
    version = adaptation(target, tmp_path, config).train(
        tmp_path / "run" / "head", [odd, *train[1:], *held_out], lambda progress: None
    )
    assert version.directory is None
    assert version.after == pytest.approx(version.before, abs=0.05)


def known_and_other_tokens(target, samples):
    """Return ids: special ones, those of the samples and others; and lower ids than most."""
    answered = {each for sample in samples for each in sample.token_ids}
    answered |= special_tokens(target.directory)
    free = [each for each in range(target.config.vocab_size) if each not in answered]
    return sorted(answered | set(free[20:])), free[:20]


def test_common_draft_tokens_keep_their_noise(target, samples, tmp_path, monkeypatch):
    head = exported("medusa", target, tmp_path / "run", samples).head_directory
    found, trainer = [], Adaptation._trainer
    monkeypatch.setattr(Adaptation, "_trainer", lambda *own: found.append(own[2]) or trainer(*own))
    adaptation(target, tmp_path, TINY).train(head, samples, lambda progress: None)
    old, new = found
    columns = dict(zip(new.token_ids, new.columns, strict=True))
    common = columns.keys() & set(old.token_ids)
    assert 0 < len(common) < len(columns)
    assert all(columns[each] == old.token_ids.index(each) for each in common)
    assert sorted(new.columns) == list(range(len(old.token_ids)))


def test_too_few_held_out_answer_tokens_train_no_version(target, samples, tmp_path):
    head = exported("medusa", target, tmp_path / "run", samples).head_directory
    num_tokens = sum(len(each.answer) for each in split(samples, CONFIG.held_out, CONFIG.seed)[1])
    reports = []
    enough, more = (adaptation(target, tmp_path, CONFIG, num_tokens + each) for each in (0, 1))
    with pytest.raises(TooFewTokensError, match=rf"^{num_tokens} .*\(minimum {num_tokens + 1}\)"):
        more.train(head, samples, reports.append)
    assert not reports
    assert enough.train(head, samples, reports.append)


@pytest.mark.parametrize("method", ["mlp_speculator", "medusa"])
def test_the_head_in_use_is_evaluated_once_also_where_it_lacks_tokens(
    method, target, samples, tmp_path, monkeypatch
):
    head = exported(method, target, tmp_path / "run", samples).head_directory
    steps, evaluate = [], Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self: steps.append(self.step) or evaluate(self))
    adaptation(target, tmp_path, TINY).train(head, samples, lambda progress: None)
    assert steps.count(0) == 1


def test_a_version_that_is_not_better_does_not_exist(target, samples, tmp_path):
    trainer = exported("mlp_speculator", target, tmp_path / "run", samples)
    version = adaptation(target, tmp_path, TINY).train(
        trainer.head_directory, samples, lambda progress: None
    )
    assert (version.directory, version.after) == (None, version.before)
    assert not list(tmp_path.glob("version-*"))


@pytest.mark.parametrize("num_needed", [1, 3])
def test_the_latest_samples_are_held_out_up_to_their_limit_or_the_minimum_of_tokens(
    num_needed, target, samples, tmp_path
):
    head = exported("mlp_speculator", target, tmp_path / "run", samples).head_directory
    config = replace(TINY, method="mlp_speculator", max_held_out_samples=1)
    train, held_out = split(samples, config.held_out, config.seed)
    assert len(held_out) > num_needed
    latest = held_out[-num_needed:]
    minimum = sum(len(each.answer) for each in latest)
    own = adaptation(target, tmp_path, config, minimum)
    version = own.train(head, samples, lambda progress: None)
    data = Data(train, latest, range(target.config.vocab_size), {})
    alone = Trainer(config, target, data, tmp_path / "alone", start=ExportedHead(head))
    assert version.before == alone.best


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_version_drafts_tokens_of_the_answers_that_the_head_lacks(
    method, target, samples, tmp_path
):
    head = exported(method, target, tmp_path / "run", samples).head_directory
    own = ExportedHead(head).token_ids(target.config.vocab_size)
    longer = replace(CONFIG, num_epochs=4)
    version = adaptation(target, tmp_path, longer).train(head, samples, lambda progress: None)
    assert version.directory is not None
    tokens = ExportedHead(version.directory).token_ids(target.config.vocab_size)
    answered = {each for sample in split(samples, 0.5, CONFIG.seed)[0] for each in sample.answer}
    assert len(tokens) == len(own) >= len(answered)
    assert answered <= set(tokens)
    assert not answered <= set(own)
