"""Loading of one rank of a draft head beside its target."""

from __future__ import annotations

from pkgutil import resolve_name

from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.methods import head_methods
from specdec.kernels.backend import KernelBackend
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.formats.shape import HeadShape
from specdec.models.heads.networks.base import DraftHead
from specdec.models.heads.networks.target import TargetRank
from specdec.models.heads.tensors import HeadTensors
from specdec.models.heads.token_selection import select_tokens
from specdec.models.llama import CausalDecoder
from specdec.models.loading import Decoder
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.errors import UnsupportedModelError

MAX_DRAFT_TOKENS = 64
"""Rotary positions beyond the longest sequence, which drafts may have."""


def load_head(
    config: HeadConfig, target: Decoder, quantization: QuantizationMethod | None = None
) -> DraftHead:
    """Load this rank's shard of a head, in the target's dtype and with its kernels.

    quantization: of the head's matrices, usually the target's. Raises UnsupportedModelError for
    values in the files that cannot be used.
    """
    decoder = _torch_layers(target)
    rank = TargetRank.of(config.target, decoder, MAX_DRAFT_TOKENS)
    shape, tensors = config.shape, HeadTensors.open(config)
    if config.token_map is not None:
        shape, tensors = select_tokens(shape, tensors, config.token_map)
    _check_shares(shape, rank.group.size)
    backend = rank.backend
    reader = CheckpointReader(tensors, rank.dtype, quantization, None, rank.device, backend)
    method = head_methods()[config.method]
    head: DraftHead = resolve_name(method.network)(shape, reader, rank)
    if backend is KernelBackend.CPU and method.native_network is not None:
        head = resolve_name(method.native_network)(head)
    return head


def require_finite(config: HeadConfig) -> None:
    """Raise UnsupportedModelError for a head with weights that are NaN or infinite."""
    tensors = HeadTensors.open(config)
    for name in config.names.stored:
        tensor = tensors.slice(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UnsupportedModelError(f"{config.directory}: {name} has NaN or infinite values")


def _check_shares(shape: HeadShape, num_ranks: int) -> None:
    """Raise UnsupportedModelError where a rank would have no draft token."""
    if shape.draft_vocab_size < num_ranks:
        raise UnsupportedModelError(
            f"the head can draft {shape.draft_vocab_size} tokens, fewer than the {num_ranks} ranks "
            "that share them: give it more, or lower tensor_parallel_size"
        )


def _torch_layers(target: Decoder) -> CausalDecoder:
    decoder = target.torch_decoder if isinstance(target, NativeDecoder) else target
    assert isinstance(decoder, CausalDecoder), "heads need the layers of a CausalDecoder"
    return decoder
