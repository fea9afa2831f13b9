"""A model with selected output tokens has the whole model's logits for them, and -inf elsewhere."""

import json

import pytest
import torch

from specdec.kernels.sample import torch_row_argmax
from specdec.models.config.model_config import ModelConfig
from specdec.models.drafters.token_map import TOKEN_MAP_FILE, token_map_of
from specdec.models.loading import load_model
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads.driver import KERNELS
from tests.specdec.models.passes import BLOCK_SIZE, batch_of

SELECTED = [*range(3, 383, 5), 380]
IDS = [(29 * i) % 380 + 3 for i in range(9)]


def load(directory, group, output_tokens, kernels, quantization=None):
    return load_model(
        directory,
        ModelConfig.from_directory(directory),
        group,
        dtype=torch.float32,
        max_model_len=64,
        block_size=BLOCK_SIZE,
        quantization=quantization,
        kernels=kernels,
        output_tokens=output_tokens,
    )


def logits_and_argmax(model):
    with torch.inference_mode():
        hidden = model(batch_of([(IDS, 0, [0, 1, 2])]), model.new_kv_cache(4 * BLOCK_SIZE))
        logits, argmax = model.compute_logits_and_argmax(hidden, torch_row_argmax)
        assert torch.equal(logits, model.compute_logits(hidden))
    assert logits.shape == (len(IDS), len(model.vocab_slice))
    return logits, argmax.token_ids + model.vocab_slice.start


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [1, 2])
def test_selected_tokens_have_the_logits_of_the_whole_model(
    size, kernels, quantization, tiny_model_dir
):
    def on_ranks(output_tokens):
        def rank(group):
            model = load(tiny_model_dir, group, output_tokens, kernels, quantization)
            return logits_and_argmax(model)

        found = run_ranks(size, rank)
        return torch.cat([logits for logits, _ in found], dim=1), [ids for _, ids in found]

    whole, _ = on_ranks(None)
    logits, argmax = on_ranks(SELECTED)
    torch.testing.assert_close(logits[:, SELECTED], whole[:, SELECTED], rtol=1e-5, atol=1e-5)
    others = sorted(set(range(383)) - set(SELECTED))
    assert (logits[:, others] == -torch.inf).all()
    if size == 1:
        assert torch.equal(argmax[0], logits.argmax(1))


def test_a_rank_without_an_output_token_is_refused(tiny_model_dir):
    def rank(group):
        try:
            load(tiny_model_dir, group, [300, 301], "torch")
        except UnsupportedModelError as error:
            return str(error)
        return "loaded"

    *others, last = run_ranks(3, rank)  # the tokens are those of the last rank
    assert last == "loaded"
    assert all("none of the 2 tokens that may be drafted" in each for each in others)


def test_the_list_of_a_directory_may_be_replaced(tmp_path):
    assert token_map_of(tmp_path, None, 10) is None
    (tmp_path / TOKEN_MAP_FILE).write_text("[3, 1, 3]")
    assert token_map_of(tmp_path, None, 10) == (1, 3)
    other = tmp_path / "other.json"
    other.write_text(json.dumps([7]))
    assert token_map_of(tmp_path, str(other), 10) == (7,)
    with pytest.raises(InvalidValueError, match="it must be a list of token ids") as caught:
        token_map_of(tmp_path, None, 3)
    assert caught.value.value == str(tmp_path / TOKEN_MAP_FILE)
