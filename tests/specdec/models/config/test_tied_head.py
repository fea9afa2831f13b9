"""An output head in the files beside embeddings that config.json ties to it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engine.models.checkpoint_lint import require_loadable
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.tied_head import has_own_head
from specdec.types.errors import UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.passes import load, mixed_logits


@pytest.fixture
def with_head(tiny_model_dir, tmp_path):
    """A function that writes the tied tiny model with a head, a function of the embedding."""

    def write(head_of, name="lm_head.weight"):
        shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
        weights = load_file(tmp_path / "model.safetensors")
        weights[name] = head_of(weights["model.embed_tokens.weight"]).clone()
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return write


def test_a_copy_stays_tied(tiny_model_dir, with_head, caplog):
    assert not has_own_head(tiny_model_dir)
    assert ModelConfig.from_directory(with_head(lambda table: table)).tie_word_embeddings
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_another_head_is_used(with_head, caplog, name):
    directory = with_head(lambda table: table.flip(0), name)
    assert not ModelConfig.from_directory(directory).tie_word_embeddings
    assert "the stored head is used" in caplog.text
    (model,) = run_ranks(1, lambda group: load(directory, group, kernels="torch"))
    hidden = torch.eye(model.hidden_size)
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(model.compute_logits(hidden), table.flip(0).t())


def test_a_head_of_another_type_or_in_codes_is_used(with_head):
    assert has_own_head(with_head(lambda table: table.half()))
    assert has_own_head(with_head(lambda table: table.int(), "lm_head.qweight"))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_head_alone_is_the_embedding(tiny_model_dir, with_head, kernels):
    directory = with_head(lambda table: table)
    weights = load_file(directory / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = ModelConfig.from_directory(directory)
    require_loadable(directory, config)
    expected, found = (
        mixed_logits(each, [[7, 300] * 17, [5] * 27], TensorParallelGroup(), kernels=kernels)
        for each in (tiny_model_dir, directory)
    )
    assert torch.equal(found, expected)
    with pytest.raises(UnsupportedModelError, match=r"no tensor model\.embed_tokens\.weight"):
        require_loadable(directory, replace(config, tie_word_embeddings=False))


def test_the_index_decides_about_a_head_of_several_files(tmp_path):
    embedding = torch.ones(4, 3)
    first = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    save_file(first, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": 2 * embedding}, tmp_path / "b.safetensors")
    for owner, is_other in (("a", False), ("b", True)):
        files = dict.fromkeys(first, "a.safetensors") | {"lm_head.weight": f"{owner}.safetensors"}
        index = {"weight_map": files | {"x": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert has_own_head(tmp_path) is is_other
