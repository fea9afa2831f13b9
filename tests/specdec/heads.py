"""Draft heads that are fitted to texts of a tiny model, so that some of their drafts are right."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.specdec.attention_heads import FITTED_METHODS, fitted_head_dir
from tests.specdec.models.families import reference_model

NUM_HEADS = 5
_SHARPNESS = 12.0
"""Logit of the fitted token; that of others is near 0."""
_NOISE = 0.5
"""Deviation of the noise in a draft model's weights, in their own."""


def fitted_medusa_dir(target: Path, directory: Path, texts: Sequence[Sequence[int]]) -> Path:
    """Write Medusa heads in vLLM's layout, whose output heads are fitted by least squares."""
    samples = _Samples.of(target, texts)
    size = samples.hidden.shape[1]
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(size, size)
        tensors[f"lm_heads.{head}.weight"] = samples.fit(samples.hidden, head)
    config = {
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": samples.vocab_size,
        "num_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
    }
    return _save(directory, config, tensors)


def medusa_dir_with_nan(target: Path, directory: Path, texts: Sequence[Sequence[int]]) -> Path:
    """Write fitted Medusa heads, of which the third has NaN."""
    path = fitted_medusa_dir(target, directory, texts) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_heads.2.weight"].fill_(torch.nan)
    save_file(tensors, path)
    return directory


def fitted_mlp_speculator_dir(
    target: Path, directory: Path, texts: Sequence[Sequence[int]]
) -> Path:
    """Write an MLP speculator with random states, whose output heads are fitted."""
    samples = _Samples.of(target, texts)
    size, vocab = samples.hidden.shape[1], samples.vocab_size
    generator = torch.Generator().manual_seed(9)
    state_weight = 0.5 ** (0.5 / NUM_HEADS)
    token_weight = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
    tensors: dict[str, Tensor] = {}
    state = samples.hidden
    for head in range(NUM_HEADS):
        projection = torch.randn(size, size, generator=generator) / size**0.5
        embedding = torch.randn(vocab, size, generator=generator) / size**0.5
        mixed = state @ projection.T + token_weight * embedding[samples.tokens_after(head)]
        state = F.gelu(mixed * (mixed.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        tensors[f"speculator.proj.{head}.weight"] = projection
        tensors[f"speculator.emb.{head}.weight"] = embedding
        tensors[f"speculator.ln.{head}.weight"] = torch.ones(size)
        tensors[f"speculator.ln.{head}.bias"] = torch.zeros(size)
        tensors[f"speculator.head.{head}.weight"] = samples.fit(state, head)
    config = {
        "model_type": "mlp_speculator",
        "emb_dim": size,
        "inner_dim": size,
        "vocab_size": vocab,
        "n_predict": NUM_HEADS,
    }
    return _save(directory, config, tensors)


class _Samples:
    """Hidden states of a target, each with the tokens that follow in the text."""

    def __init__(self, hidden: Tensor, following: Tensor, vocab_size: int) -> None:
        self.hidden = hidden  # [N, hidden_size], final and normed
        self._following = following  # [N, NUM_HEADS + 1], the token after it first
        self.vocab_size = vocab_size

    @classmethod
    def of(cls, target: Path, texts: Sequence[Sequence[int]]) -> _Samples:
        model = reference_model(target)
        parts = list(_windows(model, texts))
        hidden, following = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(hidden, following, model.config.vocab_size)

    def tokens_after(self, head: int) -> Tensor:
        """Return the token before the draft token of a head, [N]."""
        return self._following[:, head]

    def fit(self, states: Tensor, head: int) -> Tensor:
        """Return weights [vocab_size, size] that map states [N, size] to a head's token."""
        wanted = F.one_hot(self._following[:, head + 1], self.vocab_size).float()
        return (torch.linalg.pinv(states, rtol=1e-3) @ wanted * _SHARPNESS).T.contiguous()


@torch.inference_mode()
def _windows(
    model: PreTrainedModel, texts: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for text in texts:
        tokens = torch.tensor(text)
        hidden = model.model(tokens[None]).last_hidden_state[0]
        following = tokens[1:].unfold(0, NUM_HEADS + 1, 1)
        yield hidden[: len(following)], following


def _save(directory: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def copied_model_dir(target: Path, directory: Path, texts: Sequence[Sequence[int]]) -> Path:
    """Write the target with other weights in its last layer, which drafts well but not always."""
    del texts
    shutil.copytree(target, directory, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if "layers.1.mlp" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor + _NOISE * tensor.float().std() * noise).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


HEADS = {
    "medusa": fitted_medusa_dir,
    "mlp_speculator": fitted_mlp_speculator_dir,
    **{method: partial(fitted_head_dir, method) for method in FITTED_METHODS},
    "colocated_draft_model": copied_model_dir,
}
"""Functions that write a fitted head, by method."""
