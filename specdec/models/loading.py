"""Makes one rank of a model from a checkpoint: in torch, or in native kernels where they run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import native_library
from specdec.kernels.forward_batch import ModelInput
from specdec.kernels.sample import RowArgmax
from specdec.models.config import ModelConfig
from specdec.models.cpu_decoder import native_decoder
from specdec.models.llama import CausalDecoder
from specdec.models.weights.checkpoint import CPU, open_checkpoint
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """One rank of a decoder. The two calls that compute are collective ones."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_slice(self) -> range:
        """The tokens whose logits this rank computes."""
        ...

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """A pool of zeros for so many tokens, whole blocks; its layout is the decoder's affair."""
        ...

    def __call__(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """Writes the batch's KV into `kv_cache`; returns hidden states [T, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size]; returns this rank's logits [R, len(vocab_slice)]."""
        ...

    def compute_logits_and_argmax(self, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
        """The same, and the best of each row among them."""
        ...


def load_model(
    directory: Path,
    config: ModelConfig,
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    block_size: int,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    kernels: Kernels = "auto",
) -> Decoder:
    """One rank of the model in a Hugging Face directory.

    quantization: how the matrices of its linear layers are held; None in `dtype`, like the rest.
    device: where the model runs. Raises UnsupportedModelError where the quantization cannot.
    kernels: what the model is computed by. Raises InvalidValueError where "native" cannot be had.
    A collective call where it is "auto": all ranks take the same.
    """
    if quantization is not None and device.type != "cpu":
        raise UnsupportedModelError(f"quantization {quantization} runs on a CPU, not on {device}")
    if kernels == "auto" and device.type == "cpu":
        kernels = _kernels_of_all(group)
    reader = open_checkpoint(directory, dtype, quantization, device, kernels)
    model = CausalDecoder(config, reader, group, max_model_len, block_size)
    return native_decoder(model) or model


def _kernels_of_all(group: TensorParallelGroup) -> Kernels:
    """The native kernels where every rank has them; a collective call.

    Ranks with different ones would sum tensors of other shapes and types than their peers.
    """
    has_them = native_library() is not None
    of_ranks = group.all_gather(torch.tensor([has_them], dtype=torch.int32))
    if has_them and not of_ranks.all():
        logger.warning("rank %d has CPU kernels and leaves them, since not all have", group.rank)
    return "native" if of_ranks.all() else "torch"
