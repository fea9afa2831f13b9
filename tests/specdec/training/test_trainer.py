# Modules: specdec.training.checkpoint
"""A run learns, ends early, and continues bit-equally after an interruption."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save

from specdec.training.acceptance import Acceptance
from specdec.training.checkpoint import Checkpoint, CheckpointError
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.trainer import HEAD, Data, Evaluation, Trainer
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import InvalidValueError

CONFIG = TrainingConfig(
    depth=3,
    num_epochs=6,
    batch_tokens=128,
    learning_rate=5e-3,
    evaluate_every=12,
    checkpoint_every=4,
    export_dtype="float32",
)


OWN = {
    "eagle3": {"num_epochs": 16, "learning_rate": 1e-2},
    "draft_model": {"num_layers": 1},
}
"""Settings by method: a head learns more slowly; the target of the draft model has two layers."""


class StoppedError(Exception):
    pass


def test_temperatures_weigh_by_their_held_out_steps():
    """Ten steps of 2.5 tokens and thirty of 1.5."""
    of_temperatures = {0.0: Acceptance(10, 15, (8,), (10,)), 0.8: Acceptance(30, 15, (15,), (30,))}
    evaluation = Evaluation(7, of_temperatures)
    assert evaluation.mean_length == pytest.approx((10 * 2.5 + 30 * 1.5) / 40)
    assert evaluation.as_json()["mean_accepted_length"] == 1.75


@pytest.fixture
def data(target, samples):
    token_ids = list(range(target.config.vocab_size))
    held_out = samples[::6]
    return Data([each for each in samples if each not in held_out], held_out, token_ids, {})


def test_drafts_of_another_depth_are_not_counted(target, data, tmp_path, monkeypatch):
    trainer = Trainer(CONFIG, target, data, tmp_path)
    monkeypatch.setattr(trainer._objective, "drafts", lambda *_: torch.zeros(2, 500))
    with pytest.raises(AssertionError, match=r"^the drafter drafted 2 tokens \(depth 3\)"):
        trainer.evaluate()


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_held_out_accepted_length_grows(method, target, data, tmp_path):
    config = dataclasses.replace(CONFIG, method=method, **OWN.get(method, {}))
    trainer = Trainer(config, target, data, tmp_path)
    untrained = trainer.evaluate().mean_length
    reports = []
    trainer.run(reports.append)
    card = json.loads((tmp_path / HEAD / "card.json").read_text())
    assert trainer.best > untrained + 0.3, (trainer.best, untrained)
    assert [each.step for each in reports] == list(range(1, trainer.num_steps + 1))
    assert reports[-1].loss < reports[0].loss
    assert card["training"]["method"] == method
    assert card["held_out"]["step"] == card["training"]["step"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon"}, marks=pytest.mark.slow),
        {"method": "dspark", "max_anchors": 6, "optimizer": "muon"},
        {"method": "draft_model", "num_layers": 1},
    ],
    ids=["adamw", "muon", "anchors", "draft model"],
)
def test_an_interrupted_run_ends_with_the_same_weights(changes, target, data, tmp_path):
    config = dataclasses.replace(CONFIG, num_epochs=3, evaluate_every=5, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = Trainer(config, target, data, whole)
    undisturbed.run(lambda _: None)

    def interrupt(progress):
        if progress.step == 6:
            raise StoppedError

    with pytest.raises(StoppedError):
        Trainer(config, target, data, parts).run(interrupt)
    continued = Trainer(config, target, data, parts)
    assert continued.step == 4
    continued.run(lambda _: None)
    assert (parts / HEAD / "card.json").read_text() == (whole / HEAD / "card.json").read_text()
    left, right = (load_file(each / HEAD / "model.safetensors") for each in (whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left)
    for name, weight in undisturbed.drafter.state_dict().items():
        assert torch.equal(weight, continued.drafter.state_dict()[name]), name


def test_a_step_trains_a_limited_number_of_bases(target, data, tmp_path):
    seen = []

    def limited(limit):
        config = dataclasses.replace(CONFIG, num_epochs=1, max_anchors=limit)
        trainer = Trainer(config, target, data, tmp_path / str(limit))
        train = trainer._train
        trainer._train = lambda batch: (seen.append(batch), train(batch))[1]
        trainer.run(lambda _: None)
        return torch.cat([batch.bases for batch in seen])

    few = limited(3)
    assert {span.num_bases for batch in seen for span in batch.spans} == {3}
    seen.clear()
    assert len(limited(512)) > 2 * len(few)


def test_a_checkpoint_of_another_run_is_rejected(target, data, tmp_path):
    config = dataclasses.replace(CONFIG, num_epochs=1)
    Trainer(config, target, data, tmp_path).run(lambda _: None)
    with pytest.raises(InvalidValueError, match="seed is 3"):
        Trainer(dataclasses.replace(config, seed=3), target, data, tmp_path)
    fewer = dataclasses.replace(data, train=data.train[1:])
    with pytest.raises(InvalidValueError, match="data is"):
        Trainer(config, target, fewer, tmp_path)
    other = TargetPrecision("bfloat16", kernels="torch")
    with pytest.raises(InvalidValueError, match="target_dtype is 'bfloat16'"):
        Trainer(config, Target(target.directory, 128, other), data, tmp_path)


def test_a_run_that_starts_from_a_head_continues_with_its_own_weights(target, data, tmp_path):
    config = dataclasses.replace(CONFIG, num_epochs=1, checkpoint_every=1)
    Trainer(config, target, data, tmp_path / "first").run(lambda _: None)
    head = ExportedHead(tmp_path / "first" / HEAD)

    def trainer(start=head):
        return Trainer(config, target, data, tmp_path / "second", start=start)

    begun = trainer()
    assert begun.best == pytest.approx(begun.evaluate().mean_length)
    assert begun.drafter.tensors()["fc.weight"].equal(head.tensors["fc.weight"])
    begun.run(lambda _: None)
    continued = trainer()
    for name, weight in begun.drafter.state_dict().items():
        assert torch.equal(weight, continued.drafter.state_dict()[name]), name
    with pytest.raises(InvalidValueError, match="start is None"):
        trainer(start=None)


def test_a_checkpoint_of_another_version_is_rejected_with_its_directory(target, data, tmp_path):
    config = dataclasses.replace(CONFIG, num_epochs=1)
    Trainer(config, target, data, tmp_path).run(lambda _: None)
    found = Checkpoint.load(tmp_path)
    weights = {f"former_{name}": each for name, each in found.weights.items()}
    dataclasses.replace(found, weights=weights).save(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path} has parameters of another version"):
        Trainer(config, target, data, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "deep"])
def test_a_damaged_checkpoint_is_one_line_with_its_path(damage, target, data, tmp_path):
    config = dataclasses.replace(CONFIG, num_epochs=1)
    Trainer(config, target, data, tmp_path).run(lambda _: None)
    path = tmp_path / "checkpoint.safetensors"
    content = {
        "cut": path.read_bytes()[:-1000],
        "empty": b"",
        "other": save({"x": torch.zeros(1)}, {"format": "pt"}),
        "deep": save({"x": torch.zeros(1)}, {"state": "[" * 9000}),
    }
    path.write_bytes(content[damage])
    with pytest.raises(CheckpointError) as caught:
        Trainer(config, target, data, tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged (")
    assert "delete it to begin the run again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_held_out_answers_of_one_token_are_not_enough(target, data, tmp_path):
    short = dataclasses.replace(data, held_out=[Sample((1, 2), 1, 0.0)])
    with pytest.raises(InvalidValueError, match="two tokens or more"):
        Trainer(CONFIG, target, short, tmp_path)


def test_training_ends_when_the_accepted_length_stops_growing(target, data, tmp_path):
    # With a rate this small nothing changes after the first evaluation.
    config = dataclasses.replace(
        CONFIG, learning_rate=1e-9, num_epochs=50, evaluate_every=2, patience=3, checkpoint_every=5
    )
    trainer = Trainer(config, target, data, tmp_path)
    trainer.run(lambda _: None)
    assert trainer.step == 2 + 3 * 2 < trainer.num_steps
    again = Trainer(config, target, data, tmp_path)
    assert again.step == trainer.step
    again.run(lambda _: pytest.fail("a run that ended takes no step"))
