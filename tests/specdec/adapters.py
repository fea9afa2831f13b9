"""LoRA adapters for tests: random ones in PEFT's layout, and models with an adapter merged."""

import json
import math
import shutil

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL_LINEAR = ATTENTION + MLP
HEAD_MODULES = (
    *ALL_LINEAR,
    *("fc", "eh_proj", ".linear", ".res_connection"),
    *(f"{name}.{index}" for name in ("layers", "speculator.proj") for index in range(5)),
)
"""Linear layers of draft heads in their published layouts."""


def adapter_dir(
    directory,
    model_dir,
    *,
    rank=4,
    seed=0,
    modules=ALL_LINEAR,
    layers=None,
    gain=0.7,
    dtype=torch.float32,
    **config,
):
    """Write a random adapter for the model in `model_dir`; return `directory`.

    modules: ends of their names; None for all linear layers of the decoder layers. layers: indices;
    None for all. gain: size of the update, relative to the weight's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for name, weight in sorted(load_file(model_dir / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        is_matrix = ".layers." in name and weight.ndim == 2 and "norm" not in name
        if not (is_matrix if modules is None else module.endswith(tuple(modules))):
            continue
        if layers is not None and int(module.split(".")[2]) not in layers:
            continue
        out_features, in_features = weight.shape
        down = torch.randn(rank, in_features, generator=generator) / in_features**0.5
        up = torch.randn(out_features, rank, generator=generator) * gain / rank**0.5
        for side, tensor in (("A", down), ("B", up)):
            key = f"base_model.model.{module}.lora_{side}.weight"
            tensors[key] = tensor.to(dtype).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear"
        if modules is None
        else [each.rpartition(".")[2] for each in modules],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def varied_adapter_dirs(root, model_dir):
    """Write adapters that differ in rank, modules and layers; return their directories by name."""
    variants = {"a": {}, "b": {"rank": 8, "modules": ATTENTION}, "c": {"rank": 16, "layers": [1]}}
    return {
        name: adapter_dir(root / name, model_dir, seed=seed, **variant)
        for seed, (name, variant) in enumerate(variants.items())
    }


def scale_of(config, module):
    """Return PEFT's scale of a module, by the last part of its name."""
    last = module.rpartition(".")[2]
    rank = config["rank_pattern"].get(last, config["r"])
    alpha = config["alpha_pattern"].get(last, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def merged_dir(directory, model_dir, adapter):
    """Write the model in `model_dir` with an adapter merged into its weights; return its path."""
    shutil.copytree(model_dir, directory)
    weights = load_file(model_dir / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
        weight = weights[f"{module}.weight"]
        update = scale_of(config, module) * up @ down
        weights[f"{module}.weight"] = (weight.double() + update).to(weight.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def rewrite(adapter, tensors=None, **config):
    """Change keys of an adapter's configuration, and its tensors by a function of them."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors is not None:
        weights = adapter / "adapter_model.safetensors"
        save_file(tensors(load_file(weights)), weights)
    return adapter
