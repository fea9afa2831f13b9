# Modules: specdec.models.heads.config, specdec.models.heads.formats.layers
# Modules: specdec.models.heads.formats.shape, specdec.models.heads.formats.source
# Modules: specdec.models.heads.formats.speculators, specdec.models.heads.loading
# Modules: specdec.models.heads.tensors, specdec.models.weights.dequantized_tensors
"""Checkpoints that do not fit: each gives one line that names the field or the tensor."""

# ruff: noqa: E501

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.types.errors import SpecdecError
from tests.specdec.models.heads.driver import VOCAB, save, target_model
from tests.specdec.models.heads.formats import test_eagle as eagle
from tests.specdec.models.heads.formats import test_mtp as mtp
from tests.specdec.models.heads.networks import test_dflash as dflash
from tests.specdec.models.heads.networks import test_eagle3 as eagle3
from tests.specdec.models.heads.networks import test_hydra as hydra
from tests.specdec.models.heads.networks import test_medusa as medusa
from tests.specdec.models.heads.networks import test_mlp_speculator as mlp
from tests.specdec.models.heads.networks import test_p_eagle as p_eagle
from tests.specdec.models.weights.test_checkpoint import WritesAFile

MLP = mlp.config_of(32, False, False)


def of_mlp(made):
    return {f"speculator.{name}": tensor for name, tensor in made.items()}


def base_of(kind):
    """Return the configuration and the tensors of a checkpoint that is correct."""
    match kind:
        case "medusa":
            return medusa.VLLM, medusa.of_vllm(medusa.medusa_weights())
        case "mlp":
            return MLP, of_mlp(mlp.speculator_weights(32, False))
        case "hydra":
            return hydra.CONFIG, hydra.hydra_weights()
        case "eagle":
            return eagle.CONFIG, eagle.eagle_weights()
        case "eagle3":
            return eagle3.CONFIG, eagle3.midlayer(eagle3.eagle3_weights())
        case "speculators":
            return eagle3.speculators(), eagle3.eagle3_weights()
        case "p_eagle":
            config = eagle3.CONFIG | {"mask_token_id": 17, "num_hidden_layers": 2}
            return config, p_eagle.p_eagle_weights()
        case "dflash":
            return dflash.Z_LAB, dflash.block_weights()
        case "dspark":
            config = dflash.DEEPSPEC | {"mask_token_id": 17}
            return config, dflash.block_weights()


def keys(**changes):
    """Return a fault: other values of keys, or None for a key that is missing."""

    def apply(config, tensors):
        changed = {**config, **changes}
        return {name: value for name, value in changed.items() if value is not None}, tensors

    return apply


def nested(owner, **changes):
    return lambda config, tensors: (
        {**config, owner: {**config.get(owner, {}), **changes}},
        tensors,
    )


def without(name):
    return lambda config, tensors: (config, {k: v for k, v in tensors.items() if k != name})


def shaped(name, *shape, dtype=torch.float32):
    return lambda config, tensors: (config, tensors | {name: torch.ones(shape, dtype=dtype)})


def values(name, tensor):
    return lambda config, tensors: (config, tensors | {name: tensor})


def float8_layer(**scales):
    """Return a fault: a weight of float8 with these scales, or with one that has no meaning."""
    scales = scales or {"weight_scale": torch.ones(1), "pre_quant_scale": torch.ones(48)}
    stored = {"weight": torch.ones(48, 96).to(torch.float8_e4m3fn), **scales}
    named = {f"fc.{name}": tensor for name, tensor in stored.items()}
    return lambda config, tensors: (
        {**config, "quantization_config": {"quant_method": "fp8"}},
        tensors | named,
    )


GATE = "midlayer.mlp.gate_proj.weight"
ROWS = torch.arange(120)
PARTIAL = {"rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.25}
FAULTS = [
    ("medusa", keys(hidden_size=50), r"hidden_size in .* is 50; it must be 48, as in the target"),
    ("medusa", keys(vocab_size=99), r"vocab_size in .* is 99; it must be 383"),
    ("medusa", shaped("blocks.1.layers.0.weight", 48, 47), r"blocks\.1\.layers\.0.*\[48, 47\]; expected \[48, 48\]"),
    ("medusa", shaped("lm_heads.2.weight", 380, 48), r"lm_heads\.2.*\[380, 48\]; expected \[383, 48\]"),
    ("medusa", without("blocks.2.layers.1.weight"), r"no tensor blocks\.2\.1\.weight; expected"),
    ("medusa", shaped("stray.weight", 2), r"stray\.weight has shape \[2\]; expected none"),
    ("medusa", values("token_map", torch.tensor([1, 2, 383])), "maps a draft token to 383; the target has 383"),
    ("medusa", values("token_map", torch.tensor([1, 2, 2])), "maps two draft tokens to one"),
    ("medusa", shaped("token_map", 3, 1), r"token_map has shape \[3, 1\]; expected 1 dimensions"),
    ("mlp", keys(emb_dim=64), r"emb_dim in .* is 64; it must be 48"),
    ("mlp", keys(method="sum_lstm", emb_dim="48"), r"method in .* 'sum_lstm'; it must be sum_rnn; other"),
    ("mlp", keys(n_predict=0), r"n_predict in .* is 0; it must be a whole number from 1 to 1024"),
    ("mlp", keys(n_predict=10**9), r"n_predict in .* is 1000000000; it must be a whole number from 1 to 1024"),
    ("eagle3", keys(num_hidden_layers=10**9), r"num_hidden_layers in .* is 1000000000; it must be a whole number from 1 to 1024"),
    ("p_eagle", keys(num_hidden_layers=2**70), r"num_hidden_layers in .* it must be a whole number from 1 to 1024"),
    ("mlp", keys(n_predict=4), r"no tensor proj\.3\.weight"),
    ("mlp", keys(inner_dim="32"), r"inner_dim in .* is '32'; it must be a whole number"),
    ("mlp", keys(tie_weights=1), r"tie_weights in .* is 1; it must be true or false"),
    ("mlp", keys(inner_dim=16), r"has shape \[32, 48\]; expected \[16, 48\]"),
    ("hydra", keys(hydra_head_arch="prefix-mlp"), r"hydra_head_arch .* 'prefix-mlp'; it must be mlp"),
    ("hydra", keys(grounded_heads=False), r"grounded_heads in .* is False; it must be true"),
    ("hydra", without("hydra_mlp.1.0.res_connection.bias"), r"no tensor blocks\.1\.0\.res_connection\.bias"),
    ("eagle", keys(hidden_size=64), r"hidden_size in .* is 64; it must be 48"),
    ("eagle", shaped("fc.weight", 48, 144), r"fc\.weight has shape \[48, 144\]; expected \[48, 96\]"),
    ("eagle", keys(num_attention_heads=None), r"num_attention_heads in .* is None"),
    ("eagle", keys(num_key_value_heads=3), "num_key_value_heads .* is 3; it must be a divisor"),
    ("eagle", keys(rope_scaling={"rope_type": "spiral"}), "rope type spiral is not supported"),
    ("eagle", keys(hidden_act="gelu"), r"hidden_act in .* is 'gelu'; it must be silu"),
    ("eagle", keys(layer_types=["chunked_attention"]), "layer_types .* must be 1 times full_attention or"),
    ("eagle", keys(rms_norm_eps="small"), r"rms_norm_eps .* must be a number above 0"),
    ("eagle", keys(quantization_config={"quant_method": "vptq"}), "weights quantized by vptq are not supported"),
    ("eagle", without("layers.0.self_attn.o_proj.weight"), r"no tensor layers\.0\.self_attn\.o_proj"),
    ("eagle3", shaped(GATE, 41, 48), r"midlayer\.mlp\.gate_proj\.weight has shape \[41, 48\]; expected \[40, 48\]"),
    ("eagle3", keys(target_hidden_size=64), r"target_hidden_size in .* is 64; it must be 48"),
    ("eagle3", keys(draft_vocab_size=100), r"draft_vocab_size in .* is 100; it must be 120"),
    ("eagle3", without("d2t"), r"lm_head\.weight has 120 rows, and the target 383 tokens; tensor d2t"),
    ("eagle3", values("d2t", ROWS + 300), r"maps a draft token to 384; the target has 383"),
    ("eagle3", values("d2t", -ROWS), "maps two draft tokens to one token"),
    ("eagle3", shaped("fc.weight", 48, 6 * 48), r"fc\.weight has 288 inputs"),
    ("eagle3", shaped("fc.weight", 48, 100), r"fc\.weight has 100 inputs"),
    ("eagle3", nested("eagle_config", **{eagle3.IDS: [1, 3, 9]}), r"is \[1, 3, 9\]; it must be layers of the target, from -1 to 7"),
    ("eagle3", keys(**{eagle3.IDS: [1, 3, 9]}), r"it must be layers of the target, from 0 to 8"),
    ("eagle3", keys(**{eagle3.IDS: "2,4,5"}), r"is '2,4,5'; it must be a list of whole numbers"),
    ("eagle3", keys(eagle_config=3), r"eagle_config in .* is 3; it must be a JSON object"),
    ("eagle3", keys(norm_before_fc=True), r"no tensor input_norm\.weight; expected one of shape \[144\]"),
    ("eagle3", keys(hidden_size=32, head_dim=12), "hidden_size is 32 and the target's is 48"),
    ("eagle3", shaped("midlayer.self_attn.q_a_proj.weight", 3, 3), "multi-head latent attention"),
    ("eagle3", shaped("layers.0.mlp.gate_proj.weight", 40, 48), "are the same weight"),
    ("speculators", keys(speculators_model_type="xpress"), "'xpress'; it must be one of eagle3, peagle"),
    ("speculators", nested("transformer_layer_config", rope_parameters=PARTIAL), "partial_rotary_factor in .* is 0.25; it must be 1.0 beside mrope_section"),
    ("speculators", nested("transformer_layer_config", rope_scaling=PARTIAL), "partial_rotary_factor in .* is 0.25; it must be 1.0 beside mrope_section"),
    ("speculators", keys(transformer_layer_config=None), r"num_attention_heads in .* is None"),
    ("p_eagle", keys(mask_token_id=None), "has no mask_token_id, which mask_hidden needs"),
    ("p_eagle", keys(mask_token_id=VOCAB), r"mask_token_id in .* is 383; it must be a whole number from 0 to 382"),
    ("p_eagle", shaped("mask_hidden", 1, 1, 50), r"mask_hidden has shape \[1, 1, 50\]; expected \[1, 1, 144\]"),
    ("dflash", nested("dflash_config", mask_token_id=None), r"mask_token_id in .* is None"),
    ("dflash", keys(block_size=1), r"block_size in .* is 1; it must be a whole number from 2 to 64"),
    ("dflash", keys(block_size=100), r"block_size in .* is 100; it must be a whole number from 2 to 64"),
    ("dflash", keys(attention_sink_bias=True), r"an attention sink \(attention_sink_bias\) is not supported"),
    ("dflash", keys(use_swa=True, swa_window_size=5, layer_types=5), "layer_types in .* is 5; it must be 2 times"),
    ("dflash", keys(use_swa=True, swa_window_size=5, layer_types="full_attention"), "layer_types in .* must be 2 times"),
    ("dflash", keys(speculators_model_type="dflash", transformer_layer_config={"rope_parameters": PARTIAL}), "it must be 1.0 beside mrope_section"),
    ("dflash", nested("dflash_config", selector_rank=256), r"DFlash 2 \(selector_rank\) is not supported"),
    ("dflash", shaped("layers.0.attention_conv.weight", 2, 2), r"DFlash 2 \(attention_conv\) is not"),
    ("dflash", nested("dflash_config", gru_hidden_dim=8), r"Domino \(gru_hidden_dim\) is not supported"),
    ("dflash", shaped("layers.0.self_attn.kv_a_proj_with_mqa.weight", 2, 2), "multi-head latent attention"),
    ("dflash", shaped("layers.0.model.input_layernorm.weight", 48), r"layers\.0\.model\.input_layernorm\.weight has shape \[48\]; expected none"),
    ("dflash", nested("dflash_config", target_layer_ids=[1, 3]), r"fc\.weight has shape \[48, 144\]; expected \[48, 96\]"),
    ("eagle", shaped("fc.weight", 48, 96, dtype=torch.int8), "fc.weight has codes of type I8"),
    ("eagle", float8_layer(), "pre_quant_scale is part of no layout"),
    ("eagle", float8_layer(weight_scale=torch.ones(3, 1)), r"weight_scale has shape \[3, 1\]; expected"),
    ("dspark", keys(markov_rank=8), r"no tensor markov_head\.markov_w1\.weight"),
    ("dspark", keys(markov_rank=8, markov_head_type="lstm"), r"'lstm'; it must be vanilla, gated or rnn"),
]  # fmt: skip


@pytest.fixture(scope="module")
def torch_target(target_dir):
    return target_model(target_dir)


def one_line(action):
    """Return the message of the error that `action` raises."""
    with pytest.raises(SpecdecError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "fault", "words"), FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(FAULTS)]
)
def test_a_fault_gives_one_clear_line(tmp_path, target, torch_target, kind, fault, words):
    config, tensors = fault(*base_of(kind))
    save(tmp_path, config, tensors)

    def load():
        load_head(HeadConfig.from_directory(tmp_path, target), torch_target)

    message = one_line(load)
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "kind",
    ["medusa", "mlp", "hydra", "eagle", "eagle3", "speculators", "p_eagle", "dflash", "dspark"],
)
def test_without_a_fault_the_same_files_load(tmp_path, target, torch_target, kind):
    save(tmp_path, *base_of(kind))
    head = load_head(HeadConfig.from_directory(tmp_path, target), torch_target)
    assert head.feature_size % target.hidden_size == 0
    assert 0 < head.vocab_size <= target.vocab_size


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")


def deep_json(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)


def deep_header(directory: Path) -> None:
    header = b"[" * 100_000
    content = len(header).to_bytes(8, "little") + header
    (directory / "model.safetensors").write_bytes(content)


def deep_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[" * 100_000)


def control_characters(directory: Path) -> None:
    config = {"architectures": ["Other\n\x1b[2JModel"], "model_type": "other"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").unlink()
    save(directory, None, {"model.other.weight": torch.ones(2, 2)})


def nested_shape(directory: Path) -> None:
    tensor = {"dtype": "F32", "shape": [[4], 4], "data_offsets": [0, 64]}
    header = json.dumps({"fc.weight": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(64)
    (directory / "model.safetensors").write_bytes(content)


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def code_in_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    content = {"fc.weight": WritesAFile(directory / "ran")}
    torch.save(content, directory / "pytorch_model.bin")


def another_model(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({"architectures": ["OtherModel"], "model_type": "other"}))
    (directory / "model.safetensors").unlink()
    save(directory, None, {"model.other.weight": torch.ones(2, 2)})


def a_pard_model(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": 5}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_config, "has no config.json"),
        (no_json, "is not valid JSON"),
        (a_list, "is not a JSON object"),
        (deep_json, "is not valid JSON"),
        (nested_shape, "tensor fc.weight has the invalid shape ([4], 4)"),
        (control_characters, "architecture Other\\n\\x1b[2JModel,"),
        (deep_header, "cannot be read as safetensors"),
        (deep_index, "is not an index of weight files"),
        (no_weights, "has no weights in safetensors, .bin or .pt files"),
        (cut_weights, "cannot be read as safetensors"),
        (code_in_a_pickle, "objects other than tensors"),
        (another_model, "is not a draft head of a known format (architecture OtherModel"),
        (a_pard_model, "is a PARD draft model (pard_token)"),
    ],
)
def test_damaged_files(tmp_path, target, damage, words):
    save(tmp_path, eagle.CONFIG, eagle.eagle_weights())
    damage(tmp_path)
    assert words in one_line(lambda: HeadConfig.from_directory(tmp_path, target))
    assert not (tmp_path / "ran").exists()


def test_an_mtp_layer_with_an_mlp_of_another_layout(tmp_path, target_dir, target):
    family = mtp.FAMILIES["deepseek"]
    tensors = mtp.stored(mtp.weights_of_16(family), family)
    gate = f"{family.block}mlp.gate_proj.weight"
    tensors[gate.replace("gate_proj", "experts.0.gate_proj")] = tensors.pop(gate)
    directory = mtp.with_mtp(target_dir, tmp_path / "a", tensors)
    message = one_line(lambda: HeadConfig.from_directory(directory, target))
    assert "the MLP of the MTP layer is of an unknown kind; it must have mlp.gate_proj" in message


def test_a_target_without_mtp_layers(tmp_path, target_dir, target):
    directory = shutil.copytree(target_dir, tmp_path / "a")
    message = one_line(lambda: HeadConfig.from_directory(directory, target))
    assert "is not a draft head of a known format (architecture LlamaForCausalLM" in message


@pytest.mark.parametrize("types", [["sliding_attention"] * 40, 5], ids=["list", "number"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p_eagle", "dflash", "dspark"])
def test_the_tensors_have_the_sizes_where_config_json_is_that_of_the_target(
    tmp_path, target, torch_target, kind, types
):
    config, tensors = base_of(kind)
    save(tmp_path / "own", config, tensors)
    of_target = {"num_hidden_layers": 40, "intermediate_size": 99, "sliding_window": 5}
    save(tmp_path / "copied", config | of_target | {"layer_types": types}, tensors)
    own, copied = (HeadConfig.from_directory(tmp_path / each, target) for each in ("own", "copied"))
    assert copied.shape == own.shape
    (notes,) = copied.describe()[1:]
    assert f"num_hidden_layers 40, and the tensors {own.num_kv_layers}, which is used" in notes
    assert "intermediate_size 99, and the tensors 40, which is used" in notes
    load_head(copied, torch_target)
