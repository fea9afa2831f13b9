"""Random heads whose output heads are fitted to texts of a tiny model.

The layers of a head are random, so that its outputs depend on all tokens before and on its KV.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.formats.layers import layer_of_target, layer_shapes
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import DraftHead
from specdec.models.hybrid import HybridDecoder
from specdec.models.loading import Decoder, load_model

_BLOCK_SIZE, _MAX_LEN = 4, 160
_MASK_TOKEN = 17
_NUM_HYDRA_HEADS = 5
_MARKOV_RANK = 8
_SHARPNESS = 12.0
"""Logit of the fitted token; that of others is near 0."""


_Shapes = Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class _Recipe:
    """A head with random weights.

    tensors: shapes by stored name, for the target's configuration. lm_heads: names of the output
    heads, one for each fitted draft token; {} stands for the target's number of layers. config:
    keys beside the sizes of its layers. links: config and tensors that are added after the fit,
    which make logits depend on the draft tokens before.
    """

    tensors: _Shapes
    lm_heads: tuple[str, ...]
    config: Mapping[str, Any]
    is_in_target: bool = False
    has_draft_ids: bool = False
    links: tuple[Mapping[str, Any], _Shapes] | None = None


def _layer(
    target: ModelConfig, prefix: str, width: int | None = None, *norms: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer like the target's. width: of the input of attention."""
    hidden, inner = target.hidden_size, target.intermediate_size
    query, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, width or hidden),
        "self_attn.k_proj": (kv, width or hidden),
        "self_attn.v_proj": (kv, width or hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(("post_attention_layernorm", *norms), (hidden,)),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _eagle(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = target.hidden_size
    return {"fc.weight": (hidden, 2 * hidden), **_layer(target, "layers.0")}


def _eagle3(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, norms = target.hidden_size, ("input_layernorm", "hidden_norm")
    shapes = {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    return shapes | _layer(target, "midlayer", 2 * hidden, *norms)


def _p_eagle(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {**_eagle3(target), "mask_hidden": (1, 1, 3 * target.hidden_size)}


def _mtp(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, prefix = target.hidden_size, f"model.layers.{target.num_layers}"
    shapes = {f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes[f"{prefix}.shared_head.norm.weight"] = (hidden,)
    shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
    if target.experts is None:
        return shapes | _layer(target, prefix, None, "input_layernorm")
    layer = layer_shapes(layer_of_target(target, has_experts=True), 0)
    return shapes | {name.replace("layers.0", prefix, 1): shape for name, shape in layer.items()}


def _dflash(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (hidden,))
    for index in range(2):
        prefix = f"layers.{index}"
        shapes |= _layer(target, prefix, None, "input_layernorm")
        norms = (f"{prefix}.self_attn.{name}_norm.weight" for name in "qk")
        shapes |= dict.fromkeys(norms, (target.head_dim,))
    return shapes


def _vanilla(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = (f"markov_head.{name}.weight" for name in ("markov_w1", "markov_w2"))
    return dict.fromkeys(names, (target.vocab_size, _MARKOV_RANK))


def _rnn(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    joint = (3 * _MARKOV_RANK, 2 * _MARKOV_RANK + target.hidden_size)
    return {**_vanilla(target), "markov_head.joint_proj.weight": joint}


def _links(kind: str, shapes: _Shapes) -> tuple[Mapping[str, Any], _Shapes]:
    return {"markov_rank": _MARKOV_RANK, "markov_head_type": kind}, shapes


def _hydra(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, shapes = target.hidden_size, dict[str, tuple[int, ...]]()
    for index in range(_NUM_HYDRA_HEADS):
        for name in ("linear", "res_connection"):
            prefix = f"hydra_mlp.{index}.0.{name}"
            shapes[f"{prefix}.weight"] = (hidden, (index + 2) * hidden)
            shapes[f"{prefix}.bias"] = (hidden,)
    return shapes


_TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
_EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], **_TAPS}
_BLOCK = {"model_type": "qwen3", "block_size": 6, "num_hidden_layers": 2}
_BLOCK_IDS = {"mask_token_id": _MASK_TOKEN, "target_layer_ids": [0, 1]}
_RECIPES = {
    "eagle": _Recipe(_eagle, ("lm_head.weight",), {}),
    "eagle3": _Recipe(
        _eagle3, ("lm_head.weight",), {**_EAGLE3, "draft_vocab_size": 340}, has_draft_ids=True
    ),
    "mtp": _Recipe(_mtp, ("model.layers.{}.shared_head.head.weight",), {}, is_in_target=True),
    "p_eagle": _Recipe(_p_eagle, ("lm_head.weight",), {**_EAGLE3, "mask_token_id": _MASK_TOKEN}),
    "hydra": _Recipe(
        _hydra,
        tuple(f"hydra_lm_head.{index}.weight" for index in range(_NUM_HYDRA_HEADS)),
        {"hydra_num_heads": _NUM_HYDRA_HEADS, "hydra_num_layers": 1, "hydra_head_arch": "mlp"},
    ),
    "dflash": _Recipe(
        _dflash,
        ("lm_head.weight",),
        {**_BLOCK, "architectures": ["DFlashDraftModel"], "dflash_config": _BLOCK_IDS},
    ),
    "dspark": _Recipe(
        _dflash,
        ("lm_head.weight",),
        {**_BLOCK, "architectures": ["Qwen3DSparkModel"], **_BLOCK_IDS, "markov_rank": 0},
        links=_links("rnn", _rnn),
    ),
}
FITTED_METHODS = tuple(_RECIPES)
MARKOV_VARIANTS = {
    "dspark without links": replace(_RECIPES["dspark"], links=None),
    "dspark vanilla": replace(_RECIPES["dspark"], links=_links("vanilla", _vanilla)),
}
"""Heads of the method dspark beside that of its recipe."""


def fitted_head_dir(
    method: str,
    target_dir: Path,
    directory: Path,
    texts: Sequence[Sequence[int]],
    num_prompt_tokens: Sequence[int] | None = None,
    depth: int = 1,
) -> Path:
    """Write a head of `method`, whose output heads are fitted to texts by least squares.

    method: or a name of MARKOV_VARIANTS.
    num_prompt_tokens: of each text; the head is fitted after them. depth: draft tokens to which
    an output head that drafts all of them is fitted.
    """
    recipe = (_RECIPES | MARKOV_VARIANTS)[method]
    target = ModelConfig.from_directory(target_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _random(recipe.tensors(target))
    draft_ids = torch.arange(target.vocab_size)
    if recipe.has_draft_ids:
        order = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(1))
        draft_ids = order[: recipe.config["draft_vocab_size"]].sort().values
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    lm_heads = [name.format(target.num_layers) for name in recipe.lm_heads]
    for name in lm_heads:
        tensors[name] = torch.zeros(len(draft_ids), target.hidden_size)
    _save(recipe, target, target_dir, directory, tensors)
    is_shared = len(lm_heads) == 1
    starts = num_prompt_tokens or [1] * len(texts)
    places = _Places(texts, starts, depth if is_shared else len(lm_heads))
    states, tokens = _samples(directory, target_dir, target, places)
    if is_shared:
        states, tokens = states.flatten(0, 1)[:, None], tokens.flatten()[:, None]
    for index, name in enumerate(lm_heads):
        wanted = F.one_hot(tokens[:, index], target.vocab_size)[:, draft_ids].float()
        tensors[name] = (torch.linalg.pinv(states[:, index], rtol=1e-3) @ wanted).T.contiguous()
        tensors[name] *= _SHARPNESS
    if recipe.links is not None:
        keys, shapes = recipe.links
        recipe = replace(recipe, config={**recipe.config, **keys})
        tensors |= _random(shapes(target))
    return _save(recipe, target, target_dir, directory, tensors)


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return matrices that keep the variance, small biases, and norms around 1."""
    generator = torch.Generator().manual_seed(5)

    def make(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return {name: make(shape) for name, shape in shapes.items()}


def _save(
    recipe: _Recipe,
    target: ModelConfig,
    target_dir: Path,
    directory: Path,
    tensors: dict[str, Tensor],
) -> Path:
    if recipe.is_in_target:
        shutil.copytree(target_dir, directory, dirs_exist_ok=True)
        tensors = load_file(target_dir / "model.safetensors") | tensors
    else:
        sizes = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "vocab_size": target.vocab_size,
        }
        (directory / "config.json").write_text(json.dumps(sizes | dict(recipe.config)))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@dataclass(frozen=True)
class _Places:
    """Places of texts after which a head is fitted to `num_steps` draft tokens."""

    texts: Sequence[Sequence[int]]
    num_prompt_tokens: Sequence[int]
    num_steps: int

    def with_pair(self, place: int) -> list[int]:
        """Return the indices of the texts with `num_steps` tokens after the pair at `place`."""
        return [i for i, text in enumerate(self.texts) if place + self.num_steps < len(text)]

    def is_fitted(self, index: int, place: int) -> bool:
        """Return whether the pair of a text is used: those in its prompt only write KV."""
        return place >= self.num_prompt_tokens[index]


def _samples(
    directory: Path, target_dir: Path, target: ModelConfig, places: _Places
) -> tuple[Tensor, Tensor]:
    """Return inputs of the output heads [N, num_steps, hidden], and the tokens [N, num_steps]."""
    model = load_model(
        target_dir,
        target,
        TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=_MAX_LEN,
        block_size=_BLOCK_SIZE,
        kernels="torch",
    )
    head: Any = load_head(HeadConfig.from_directory(directory, target), model)
    if hasattr(head, "lm_heads"):
        head.lm_heads = nn.ModuleList(nn.Identity() for _ in head.lm_heads)
    else:
        head.lm_head = nn.Identity()
    states, tokens = zip(*_steps(model, head, places), strict=True)
    return torch.cat(states), torch.cat(tokens)


@torch.inference_mode()
def _steps(model: Decoder, head: DraftHead, places: _Places) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield states and tokens after one pair of each text, pair by pair."""
    texts, num_steps = places.texts, places.num_steps
    num_blocks = _MAX_LEN // _BLOCK_SIZE
    tables = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(len(texts))]
    num_slots = len(texts) * num_blocks * _BLOCK_SIZE
    kv_cache, head_cache = model.new_kv_cache(num_slots), head.new_kv_cache(num_slots)
    if isinstance(model, HybridDecoder):
        model.enable_states(len(texts), 0)
    whole = [
        Chunk(list(text), 0, table, state_slot=slot)
        for slot, (text, table) in enumerate(zip(texts, tables, strict=True))
    ]
    batch = ForwardBatch(whole, _BLOCK_SIZE)
    hidden, tapped = model.forward_with_taps(batch, kv_cache, head.taps)
    lengths = [len(text) for text in texts]
    features = head.features(tapped if head.taps else hidden).split(lengths)
    for place in range(1, max(lengths) - num_steps):
        own = places.with_pair(place)
        chunks = [Chunk([texts[index][place]], place, tables[index]) for index in own]
        of_pairs = torch.stack([features[index][place - 1] for index in own])
        state = head.begin(ForwardBatch(chunks, _BLOCK_SIZE), of_pairs, head_cache, num_steps)
        rows = [row for row, index in enumerate(own) if places.is_fitted(index, place)]
        if not rows:
            continue
        state, own = head.select(state, rows), [own[row] for row in rows]
        found, wanted = [], []
        for step in range(num_steps):
            tokens = [texts[index][place + 1 + step] for index in own]
            found.append(head.logits(state, step).clone())
            wanted.append(torch.tensor(tokens))
            if step + 1 < num_steps:
                state = head.advance(state, tokens, step)
        yield torch.stack(found, dim=1), torch.stack(wanted, dim=1)
