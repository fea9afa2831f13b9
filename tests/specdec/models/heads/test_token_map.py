# Modules: specdec.models.heads.token_selection
"""A head with a token map has the logits of the whole head for the tokens of the map."""

import json
import re
from itertools import cycle

import pytest
import torch

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.tensors import HeadTensors
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads.driver import (
    HIDDEN,
    RANKS_AND_KERNELS,
    VOCAB,
    draft_logits,
    save,
    sequences,
    target_model,
)
from tests.specdec.models.heads.networks import test_dflash as dflash
from tests.specdec.models.heads.networks import test_eagle3 as eagle3
from tests.specdec.models.heads.networks import test_medusa as medusa
from tests.specdec.models.heads.networks import test_p_eagle as p_eagle
from tests.specdec.models.heads.test_malformed import base_of

QUICK_CELLS = [cell for cell in RANKS_AND_KERNELS if not cell.marks]
WANTED = list(range(0, VOCAB, 3))
IDS = torch.arange(5, VOCAB, 4)


def truncated_medusa(is_cut):
    """Return a head with its own token map, over whole or truncated output heads."""
    tensors = medusa.of_vllm(medusa.medusa_weights()) | {"token_map": IDS}
    if is_cut:
        tensors = {k: v[IDS] if "lm_head" in k else v for k, v in tensors.items()}
    return medusa.VLLM | {"truncated_vocab_size": len(IDS)}, tensors


def shared_medusa():
    made = medusa.medusa_weights()
    tensors = {k: v for k, v in medusa.of_vllm(made).items() if "lm_head" not in k}
    tensors["lm_head.weight"] = made["0.out"]
    return medusa.VLLM | {"original_lm_head": True}, tensors


def write(kind, directory):
    match kind:
        case "medusa, full rows":
            save(directory, *truncated_medusa(is_cut=False))
        case "medusa, own rows":
            save(directory, *truncated_medusa(is_cut=True))
        case "medusa, shared":
            save(directory, *shared_medusa())
        case "eagle3, small":
            save(directory, eagle3.CONFIG, eagle3.midlayer(eagle3.eagle3_weights(vocab=100)))
        case "p_eagle, pickled":
            config = eagle3.CONFIG | {"mask_token_id": 17, "num_hidden_layers": 2}
            save(directory, config, p_eagle.p_eagle_weights(), "pytorch_model.bin")
        case "dspark":
            dflash.save_dspark(directory, "gated")
        case _:
            save(directory, *base_of(kind))


def write_map(directory, ids):
    path = directory / "tokens.json"
    path.write_text(json.dumps(list(ids)))
    return str(path)


KINDS = (
    "medusa",
    "medusa, full rows",
    "medusa, own rows",
    "medusa, shared",
    "eagle3",
    "eagle3, small",
    "dspark",
    "p_eagle, pickled",
)


@pytest.mark.parametrize(
    ("kind", "size", "kernels"),
    [
        pytest.param(kind, *cell.values, marks=() if cell is quick else pytest.mark.slow)
        for kind, quick in zip(KINDS, cycle(QUICK_CELLS), strict=False)
        for cell in RANKS_AND_KERNELS
    ],
)
def test_logits_are_those_of_the_whole_head(tmp_path, target_dir, target, kind, size, kernels):
    write(kind, tmp_path)
    shuffled = [*reversed(WANTED), 0, 3]
    whole = HeadConfig.from_directory(tmp_path, target)
    cut = HeadConfig.from_directory(tmp_path, target, token_map=write_map(tmp_path, shuffled))
    ids = load_head(whole, target_model(target_dir)).target_ids
    ids = torch.arange(VOCAB) if ids is None else ids
    places = torch.isin(ids, torch.tensor(WANTED)).nonzero().flatten()
    assert 0 < len(places) < len(ids)
    head = load_head(cut, target_model(target_dir))
    assert head.target_ids.tolist() == ids[places].tolist()
    assert head.vocab_size == len(places)
    parts, options = sequences(num_drafts=3), {"size": size, "kernels": kernels}
    expected = draft_logits(whole, target_dir, parts, **options)[:, :, places]
    found = draft_logits(cut, target_dir, parts, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "drafts only the 128 tokens of speculative_token_map" in cut.describe()


@pytest.mark.parametrize("kind", ["eagle", "hydra", "mlp"])
def test_heads_without_rows_to_select_are_refused(tmp_path, target, kind):
    write(kind, tmp_path)
    with pytest.raises(InvalidValueError, match=r"it must be left out: .* no output head of which"):
        HeadConfig.from_directory(tmp_path, target, token_map=write_map(tmp_path, [1]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "a JSON file with a list of token ids (Expecting"),
        ("[]", "a JSON file with a list of token ids"),
        ("[" * 100_000, "a JSON file with a list of token ids (maximum recursion"),
        ('{"1": 2}', "a JSON file with a list of token ids"),
        ("[1, true]", f"token ids from 0 to {VOCAB - 1} (it has True)"),
        ("[1, -1]", f"token ids from 0 to {VOCAB - 1} (it has -1)"),
        (f"[{VOCAB}]", f"token ids from 0 to {VOCAB - 1} (it has {VOCAB})"),
        (None, "a JSON file with a list of token ids ([Errno 2] No such file"),
    ],
)
def test_a_file_that_is_no_list_of_tokens_is_refused(tmp_path, target, text, words):
    write("medusa", tmp_path)
    path = tmp_path / "tokens.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidValueError, match=re.escape(words)) as caught:
        HeadConfig.from_directory(tmp_path, target, token_map=str(path))
    assert caught.value.field == "speculative_config.speculative_token_map"
    assert caught.value.value == str(path)
    assert "\n" not in str(caught.value)


def test_a_map_without_any_token_of_the_head_is_refused(tmp_path, target_dir, target):
    write("medusa, own rows", tmp_path)
    config = HeadConfig.from_directory(tmp_path, target, token_map=write_map(tmp_path, [0, 1]))
    with pytest.raises(UnsupportedModelError, match="none of the tokens that the head can draft"):
        load_head(config, target_model(target_dir))


def test_a_head_with_fewer_tokens_than_ranks_is_refused(tmp_path, target_dir, target):
    write("medusa", tmp_path)
    config = HeadConfig.from_directory(tmp_path, target, token_map=write_map(tmp_path, [5]))

    def load(group):
        with pytest.raises(UnsupportedModelError, match="draft 1 tokens, fewer than the 2 ranks"):
            load_head(config, target_model(target_dir, group))

    load_head(config, target_model(target_dir))
    run_ranks(2, load)


@pytest.mark.parametrize(
    ("kind", "num_matrices", "num_rows"),
    [
        ("medusa", 3, VOCAB),
        ("medusa, full rows", 3, len(IDS)),
        ("medusa, own rows", 3, len(IDS)),
        ("eagle3", 1, 120),
        ("eagle3, small", 1, 100),
    ],
)
def test_a_map_reduces_the_memory_of_output_heads(tmp_path, target, kind, num_matrices, num_rows):
    """They count with the rows that the ranks load."""
    write(kind, tmp_path)

    def weight_bytes(ids, quantization=None):
        token_map = None if ids is None else write_map(tmp_path, ids)
        config = HeadConfig.from_directory(tmp_path, target, token_map=token_map)
        return config.weight_bytes("float32", quantization)

    row = num_matrices * HIDDEN
    assert weight_bytes(None) - weight_bytes([0, 5, 9]) == 4 * row * (num_rows - 3)
    assert weight_bytes(None, "int8") - weight_bytes([0, 5, 9], "int8") == row * (num_rows - 3)
    assert weight_bytes(range(VOCAB)) == weight_bytes(None)


def test_values_replace_stored_tensors(tmp_path, target):
    write("eagle3, small", tmp_path)
    stored = HeadTensors.open(HeadConfig.from_directory(tmp_path, target))
    tensors = HeadTensors(stored.source, stored.stored, values={"d2t": torch.arange(7)})
    assert tensors.shape("d2t") == (7,)
    assert tensors.slice("d2t", slice(2, 4)).tolist() == [2, 3]
    assert stored.shape("d2t") == (100,)
