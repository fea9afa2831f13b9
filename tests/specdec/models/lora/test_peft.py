# Modules: specdec.models.lora.updates
"""Files of adapters: what is read, and the one line with which the rest is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter
from specdec.types.errors import UnsupportedModelError
from tests.specdec.adapters import adapter_dir, rewrite
from tests.specdec.models.passes import load
from tests.specdec.tiny import tiny_llama_dir

PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def adapter(model_dir, tmp_path):
    return adapter_dir(tmp_path / "adapter", model_dir, rank=4, modules=("q_proj", "down_proj"))


def refusal(directory, max_rank=16):
    with pytest.raises(UnsupportedModelError) as raised:
        AdapterFiles.read(directory, max_rank)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_scales_and_ranks(adapter):
    rewrite(adapter, lora_alpha=3, alpha_pattern={"^model.layers.0.mlp.down_proj": 10})
    files = AdapterFiles.read(adapter, 4)
    assert files.rank == 4
    assert files.scales == {
        "model.layers.0.mlp.down_proj": 2.5,
        "model.layers.0.self_attn.q_proj": 0.75,
    }
    rewrite(adapter, use_rslora=True, alpha_pattern={})
    assert set(AdapterFiles.read(adapter, 4).scales.values()) == {1.5}


def test_ranks_of_single_modules(adapter):
    def smaller(tensors):
        return {
            name: (each[:2] if "lora_A" in name else each[:, :2]).contiguous()
            if "q_proj" in name
            else each
            for name, each in tensors.items()
        }

    rewrite(adapter, smaller, rank_pattern={"self_attn.q_proj": 2})
    files = AdapterFiles.read(adapter, 16)
    assert files.ranks["model.layers.0.self_attn.q_proj"] == 2
    assert files.scales["model.layers.0.self_attn.q_proj"] == 4
    assert files.scales["model.layers.0.mlp.down_proj"] == 2
    rewrite(adapter, rank_pattern={})
    assert "q_proj has rank 2; r or rank_pattern has 4" in refusal(adapter)


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.(q|down)_proj", None, ["layers.0.mlp.down_proj", "q_proj"]]
)
def test_target_modules_may_be_written_in_any_way(adapter, targets):
    rewrite(adapter, target_modules=targets)
    assert len(AdapterFiles.read(adapter, 16).ranks) == 2


def test_names_with_the_adapter_name_of_peft(adapter):
    def renamed(tensors):
        return {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}

    before = AdapterFiles.read(adapter, 16)
    after = AdapterFiles.read(rewrite(adapter, renamed), 16)
    assert after.shapes == before.shapes


def test_pickled_weights_are_read(model_dir, adapter):
    expected = load_file(adapter / "adapter_model.safetensors")
    torch.save(expected, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    model = load(model_dir, TensorParallelGroup(), kernels="torch")
    store, seen = model.enable_adapters(), {}
    store.set = lambda _, updates: seen.update(updates)
    load_adapter(store, 1, AdapterFiles.read(adapter, 16))
    shrinks = [update.shrink.float() for update in seen.values()]
    assert torch.equal(shrinks[0], expected[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; it must be LORA"),
        ({"use_dora": True}, "use_dora is True: weight-decomposed adapters (DoRA)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']: whole modules"),
        ({"bias": "all"}, "bias is 'all': trained biases are not supported"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"target_parameters": ["experts.w"]}, "target_parameters is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"init_lora_weights": "pissa_niter_4"}, "it may change the weights of the model"),
        ({"init_lora_weights": "lora_ga"}, "is 'lora_ga': it may change the weights of the model"),
        ({"use_other": True}, "use_other is not supported"),
        ({"r": 0}, "r is 0; it must be a whole number of at least 1"),
        ({"r": 2.0}, "r is 2.0; it must be a whole number of at least 1"),
        ({"r": None}, "r is None"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a number"),
        ({"use_rslora": 1}, "use_rslora is 1; it must be true or false"),
        ({"target_modules": ["k_proj"]}, "target_modules does not name model.layers.0"),
        ({"target_modules": 3}, "target_modules is 3; it must be a string or a list"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern has '(a+)+$', which is no module's"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1]; it must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0; it must be a whole number"),
    ],
)
def test_refused_configurations(adapter, changes, expected):
    assert expected in refusal(rewrite(adapter, **changes))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_model_as_it_is(adapter, start):
    assert AdapterFiles.read(rewrite(adapter, init_lora_weights=start, use_new=None), 4).rank == 4


def test_a_rank_above_the_limit(adapter):
    assert "has rank 4; it must be at most max_lora_rank (3)" in refusal(adapter, max_rank=3)


def changed(tensors, removed=(), **added):
    return {name: t for name, t in tensors.items() if name not in removed} | added


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        ({f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(3)}, (), "magnitude"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 144)}, (), "lm_head has an"),
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, (), "is not a LoRA matrix"),
        ({}, (f"{PREFIX}.0.mlp.down_proj.lora_B.weight",), "down_proj has no lora_B"),
        (
            {f"{PREFIX}.0.mlp.down_proj.lora_B.weight": torch.ones(144, 3)},
            (),
            "the first size of A",
        ),
        ({f"{PREFIX}.0.mlp.down_proj.lora_B.weight": torch.ones(3)}, (), "not a matrix's"),
        (
            {f"{PREFIX}.0.mlp.down_proj.lora_B.weight": torch.ones(144, 4).to(torch.int8)},
            (),
            "has codes of type I8",
        ),
        ({f"{PREFIX}.0.mlp.down_proj.lora_B.x.weight": torch.ones(3, 4)}, (), "lora_B twice"),
    ],
)
def test_refused_tensors(adapter, added, removed, expected):
    rewrite(adapter, lambda tensors: changed(tensors, removed, **added))
    assert expected in refusal(adapter)


def test_missing_and_damaged_files(adapter, tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "nothing")
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 7)
    assert "cannot be read as safetensors" in refusal(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors or adapter_model.bin" in refusal(adapter)
    config = adapter / "adapter_config.json"
    config.write_text("[" * 100_000)
    assert "is not JSON" in refusal(adapter)
    config.write_text("[]")
    assert "must hold a JSON object" in refusal(adapter)
    config.write_text(json.dumps({"peft_type": "LORA", "x": "y" * 2**20}))
    assert "is larger than" in refusal(adapter)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {f"{PREFIX}.7.mlp.up_proj.lora_{s}.weight": torch.ones(4, 4) for s in "AB"},
            "model.layers.7.mlp.up_proj is not a linear layer of the model's decoder layers",
        ),
        *(
            (
                {f"base_model.model.{name}.lora_{s}.weight": torch.ones(4, 4) for s in "AB"},
                f"{name} is a module of a draft head, whose adapter is",
            )
            for name in ("fc", "midlayer.self_attn.q_proj", "model.layers.61.eh_proj")
        ),
        (
            {f"{PREFIX}.0.mlp.down_proj.lora_B.weight": torch.ones(145, 4)},
            "is updated as [145, 200]; the model's weight has shape [144, 200]",
        ),
        (
            {f"{PREFIX}.0.mlp.down_proj.lora_B.weight": torch.full((144, 4), torch.nan)},
            "down_proj.lora_B.weight has NaN or Inf",
        ),
    ],
)
def test_adapters_that_do_not_fit_the_model(model_dir, adapter, tensors, expected):
    rewrite(adapter, lambda old: old | tensors, target_modules="all-linear")
    model = load(model_dir, TensorParallelGroup(), kernels="torch")
    store = model.enable_adapters()
    with pytest.raises(UnsupportedModelError) as raised:
        load_adapter(store, 1, AdapterFiles.read(adapter, 16))
    assert expected in str(raised.value)
    assert not store._ids


def test_values_that_overflow_in_the_models_dtype(model_dir, adapter):
    """They are finite in the file, and still after the scale."""
    name = f"{PREFIX}.0.mlp.down_proj.lora_B.weight"
    rewrite(adapter, lambda old: old | {name: torch.full((144, 4), 40_000.0)})
    files = AdapterFiles.read(adapter, 16)
    for dtype in (torch.float32, torch.float16):
        store = load(
            model_dir, TensorParallelGroup(), dtype=dtype, kernels="torch"
        ).enable_adapters()
        if dtype == torch.float32:
            load_adapter(store, 1, files)
            continue
        with pytest.raises(
            UnsupportedModelError, match=r"lora_B\.weight has NaN or Inf in float16"
        ):
            load_adapter(store, 1, files)


@pytest.mark.parametrize("value", ["", "0" * 64, 7, None, "0" * 63, "A" * 64, "x" * 64])
def test_the_fingerprint_of_a_head(adapter, value):
    rewrite(adapter, head_sha256=value)
    if value in ("", "0" * 64):
        assert AdapterFiles.read(adapter).head_sha256 == value
    else:
        text = f"head_sha256 is {value!r}; it must be 64 hexadecimal digits in lower case"
        assert text in refusal(adapter)


def test_the_fingerprint_covers_scales_and_weights(adapter):
    found = {AdapterFiles.read(adapter).fingerprint}
    found.add(AdapterFiles.read(rewrite(adapter, lora_alpha=5)).fingerprint)
    halved = rewrite(adapter, lambda tensors: {name: each / 2 for name, each in tensors.items()})
    found.add(AdapterFiles.read(halved).fingerprint)
    assert len(found) == 3


def test_no_layer_takes_adapters(adapter):
    with pytest.raises(UnsupportedModelError, match="layers of the owner, which has none"):
        AdapterFiles.read(adapter).require_modules({}, "layers of the owner")
