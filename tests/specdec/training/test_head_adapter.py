"""Adapters of heads: what is trained, what is written, and that a rank loads it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.lora.peft import AdapterFiles
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import TRAINED_METHODS
from specdec.training.trainer import Data, Trainer
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.worker.head.adapters import HeadAdapters
from tests.specdec.adapters import adapter_dir
from tests.specdec.training.targets import CONFIG, exported

METHODS = sorted({*TRAINED_METHODS} - {"draft_model"})


def trained(method, target, samples, directory, **changes):
    """Train a head, then an adapter of it; return the head's directory and the second trainer."""
    head = exported(method, target, directory / "first", samples).head_directory
    start = ExportedHead(head)
    config = replace(CONFIG, num_epochs=4, lora_rank=4, **start.settings, **changes)
    ids = start.token_ids(target.config.vocab_size)
    data = Data(samples[4:], samples[:4], ids, {"corpus": "own"})
    return head, Trainer(config, target, data, directory / "second", start=start)


@pytest.mark.parametrize("method", METHODS)
def test_the_adapter_alone_is_trained_and_a_rank_loads_it(method, target, samples, tmp_path):
    head, trainer = trained(method, target, samples, tmp_path)
    parameters = dict(trainer.drafter.named_parameters())
    before = {name: each.clone() for name, each in parameters.items()}
    trainer.run(lambda progress: None)
    trainer.export()
    changed = {name for name, each in parameters.items() if not each.equal(before[name])}
    assert changed == {name for name, each in parameters.items() if each.requires_grad}
    adapter = trainer.head_directory
    assert adapter.name == "adapter"
    files, config = AdapterFiles.read(adapter, 4), HeadConfig.from_directory(head, target.config)
    stored, own, weights = (
        load_file(files.weights),
        trainer.drafter.tensors(),
        load_file(head / "model.safetensors"),
    )
    for module, (down, up) in files.names.items():
        name = config.names.stored.get(f"{module}.weight", f"{module}.weight")
        merged = weights[name] + stored[up] @ stored[down]
        torch.testing.assert_close(merged, own[name])
        weights[name] = own[name]
    assert all(each.equal(own[name]) for name, each in weights.items())
    adapters = HeadAdapters(torch.float32)
    adapters.serve(loaded := load_head(config, target.decoder), config)
    adapters.load(1, files)
    [version] = adapters._versions.values()
    names = {each.name for linear in version.store.linears for each in linear.projections}
    assert len(files.ranks) == len(names), "all layers that a rank adapts are trained"
    del loaded
    card = json.loads((adapter / "card.json").read_text())
    assert card["training"]["lora_rank"] == 4
    assert card["corpus"] == "own"


def test_an_adapter_of_another_head_is_refused(target, samples, tmp_path):
    head, trainer = trained("medusa", target, samples, tmp_path)
    trainer.export()
    other = exported("medusa", target, tmp_path / "other", samples, num_epochs=2).head_directory
    adapters = HeadAdapters(torch.float32)
    config = HeadConfig.from_directory(other, target.config)
    adapters.serve(first := load_head(config, target.decoder), config)
    files = AdapterFiles.read(trainer.head_directory)
    with pytest.raises(UnsupportedModelError, match="was made for a head with weights"):
        adapters.load(1, files)
    config = HeadConfig.from_directory(head, target.config)
    adapters.serve(second := load_head(config, target.decoder), config)
    shutil.copy(other / "model.safetensors", head)  # the version in memory stays what it is
    adapters.load(1, files)  # for the version that it was made for
    assert first._adapters._ids == {1: False}
    assert second._adapters._ids == {1: True}
    updates = [each.blocks[0].layers[0].linear.matrix._updates for each in (first, second)]
    assert [set(each) for each in updates] == [set(), {1}]


def test_an_adapter_names_the_head_that_was_read(target, samples, tmp_path):
    head, trainer = trained("medusa", target, samples, tmp_path)
    before = weights_fingerprint(head)
    shutil.copy(target.directory / "model.safetensors", head)
    trainer.export()
    assert AdapterFiles.read(trainer.head_directory).head_sha256 == before


def test_a_further_version_gets_the_adapters_that_were_loaded(target, samples, tmp_path):
    head, trainer = trained("medusa", target, samples, tmp_path)
    trainer.export()
    config = HeadConfig.from_directory(head, target.config)
    adapters = HeadAdapters(torch.float32)
    adapters.serve(first := load_head(config, target.decoder), config)
    adapters.load(1, AdapterFiles.read(trainer.head_directory))
    shutil.rmtree(trainer.head_directory)
    adapters.serve(second := load_head(config, target.decoder), config)
    of_layer = [each.blocks[0].layers[0].linear.matrix._updates for each in (first, second)]
    shrinks = [updates[1].shrink for updates in of_layer]
    x = torch.randn(3, target.config.hidden_size)
    assert shrinks[0].multiply(x).equal(shrinks[1].multiply(x))
    assert shrinks[0].multiply(x).any()


def test_a_run_continues_with_the_same_weights(target, samples, tmp_path):
    _, trainer = trained("eagle3", target, samples, tmp_path, checkpoint_every=1)
    half = trainer.num_steps // 2

    def stop(progress):
        if progress.step == half:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    start = ExportedHead(tmp_path / "first" / "head")
    again = Trainer(trainer._config, target, trainer._data, tmp_path / "second", start=start)
    assert again.step in (half, half - 1)
    again.run(lambda progress: None)
    _, whole = trained("eagle3", target, samples, tmp_path / "whole", checkpoint_every=1)
    whole.run(lambda progress: None)
    for name, each in whole.drafter.tensors().items():
        torch.testing.assert_close(each, again.drafter.tensors()[name])


def test_the_teacher_has_the_adapter_of_the_target(target, samples, tmp_path):
    adapter = adapter_dir(tmp_path / "adapter", target.directory)
    adapted = Target(target.directory, 128, TargetPrecision(kernels="torch"), adapter=adapter)
    _, plain = trained("medusa", target, samples, tmp_path / "plain")
    start = ExportedHead(tmp_path / "plain" / "first" / "head")
    own = Trainer(plain._config, adapted, plain._data, tmp_path / "own", start=start)
    batch = plain._batch(0)
    states = [each.hidden_states(batch, (1,)) for each in (target, adapted)]
    assert not torch.allclose(states[0].final, states[1].final, atol=1e-2)
    plain._save()
    with pytest.raises(InvalidValueError, match="adapter"):
        Trainer(plain._config, adapted, plain._data, tmp_path / "plain" / "second", start=start)
    assert own._run_id["adapter"] == adapted.adapter_hash
