"""Decoders of published sizes with random weights, made on the device: for costs only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.config.kv_cache import KVCacheDType
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.backend import KernelBackend
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.model_config import ModelConfig
from specdec.models.dtypes import kv_dtype_of
from specdec.models.hybrid import HybridDecoder
from specdec.models.llama import CausalDecoder
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.models.weights.dequantize import Float8
from specdec.models.weights.tensor_headers import TensorHeaders
from specdec.types.errors import UnsupportedModelError

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
LLAMA_8B: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
"""Sizes of Llama-3.1-8B."""
LLAMA_1B: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
"""Sizes of Llama-3.2-1B."""
SMALL: Mapping[str, Any] = {
    **_LLAMA,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "eos_token_id": 1,
}
"""Sizes for tests."""


class RandomTensors:
    """Random tensors of the shapes of a model, made when they are read; vectors are 1."""

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        stores_float8: bool = False,
    ) -> None:
        """stores_float8: whether linear layers have 8-bit floats, and a scale for each output."""
        self._device, self._dtype = device, dtype
        self._shapes = decoder_tensors(model, TensorHeaders({}))
        self._scales: dict[str, float] = {}
        if stores_float8:
            for name, shape in list(self._shapes.items()):
                if name.endswith("_proj.weight"):
                    scale = name + "_scale"
                    self._shapes[scale] = (shape[0], 1)
                    self._scales[scale] = shape[1] ** -0.5

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        if name not in self._shapes:
            raise UnsupportedModelError(f"a random model has no {name}")
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return "F8_E4M3" if f"{name}_scale" in self._scales else "F32"

    def slice(self, name: str, *window: slice) -> Tensor:
        """See TensorSource."""
        shape = self.shape(name)
        size = [
            len(range(*part.indices(whole))) for part, whole in zip(window, shape, strict=False)
        ]
        size += shape[len(size) :]
        if name in self._scales:
            return torch.full(size, self._scales[name], device=self._device)
        if len(size) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)
        values = torch.empty(size, device=self._device, dtype=self._dtype)
        if f"{name}_scale" in self._scales:
            return values.normal_().to(torch.float8_e4m3fn)
        return values.normal_(std=shape[1] ** -0.5)


def write_config(directory: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """Write the config.json of a model; return what it means."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def random_decoder(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    block_size: int,
    *,
    deterministic: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
    quantization: QuantizationMethod | None = None,
    stores_float8: bool = False,
) -> CausalDecoder:
    """Make a decoder with random weights on the device.

    deterministic, quantization: need Triton. stores_float8: whether the layers are those of an FP8
    checkpoint with a scale for each output.
    """
    kernels: Kernels = "triton" if deterministic else "torch"
    if device.type == "cuda":
        kernels = "auto"
    backend = KernelBackend.select(kernels, device, deterministic=deterministic)
    layout = Float8(None) if stores_float8 else None
    source = RandomTensors(model, device, dtype, stores_float8=stores_float8)
    reader = CheckpointReader(source, dtype, quantization, layout, device, backend)
    kind: type[CausalDecoder] = CausalDecoder if model.recurrent is None else HybridDecoder
    return kind(
        model,
        reader,
        TensorParallelGroup(),
        max_model_len,
        block_size,
        kv_dtype=kv_dtype_of(dtype, kv_cache_dtype),
    )
