"""Loading of one rank of a draft head beside its target."""

from __future__ import annotations

from dataclasses import replace

from specdec.config.quantization import QuantizationMethod
from specdec.kernels.backend import KernelBackend
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.formats.hydra import HydraShape
from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.formats.mlp_speculator import MlpSpeculatorShape
from specdec.models.heads.formats.shape import HeadShape
from specdec.models.heads.networks.base import DraftHead
from specdec.models.heads.networks.dflash import DFlashHead
from specdec.models.heads.networks.eagle3 import Eagle3Head
from specdec.models.heads.networks.fused import FusedHead
from specdec.models.heads.networks.hydra import HydraHeads
from specdec.models.heads.networks.medusa import MedusaHeads
from specdec.models.heads.networks.mlp_speculator import MlpSpeculator
from specdec.models.heads.networks.native import NativeHead
from specdec.models.heads.networks.native_dflash import NativeDFlashHead
from specdec.models.heads.networks.native_medusa import NativeMedusaHeads
from specdec.models.heads.networks.p_eagle import ParallelEagleHead
from specdec.models.heads.networks.target import TargetRank
from specdec.models.heads.networks.vocabulary import checked_ids
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
    match shape:
        case MedusaShape():
            heads = _load_medusa(shape, reader, tensors, rank, config)
            is_native = backend is KernelBackend.CPU and rank.group.size == 1
            return NativeMedusaHeads(heads) if is_native and heads.has_plain_logits else heads
        case MlpSpeculatorShape():
            return MlpSpeculator(shape, reader, rank)
        case FusedShape():
            reader.tensors = replace(tensors, adds_one=shape.adds_one)
            return _fastest(FusedHead(shape, reader, rank), backend)
        case Eagle3Shape(mask_token_id=int()):
            return ParallelEagleHead(shape, reader, rank)
        case Eagle3Shape():
            return _fastest(Eagle3Head(shape, reader, rank), backend)
        case HydraShape():
            return HydraHeads(shape, reader, rank)
        case DFlashShape():
            blocks = DFlashHead(shape, reader, rank)
            return NativeDFlashHead(blocks) if backend is KernelBackend.CPU else blocks
    raise AssertionError(f"no network for {config.method}")


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


def _fastest(head: Eagle3Head | FusedHead, backend: KernelBackend) -> DraftHead:
    """Return the head on native kernels, where they are selected."""
    return NativeHead(head) if backend is KernelBackend.CPU else head


def _torch_layers(target: Decoder) -> CausalDecoder:
    decoder = target.torch_decoder if isinstance(target, NativeDecoder) else target
    assert isinstance(decoder, CausalDecoder), "heads need the layers of a CausalDecoder"
    return decoder


def _load_medusa(
    shape: MedusaShape,
    reader: CheckpointReader,
    tensors: HeadTensors,
    rank: TargetRank,
    config: HeadConfig,
) -> MedusaHeads:
    if not shape.has_token_map:
        return MedusaHeads(shape, reader, rank, None)
    target_ids = checked_ids(tensors.slice("token_map"), config.target.vocab_size)
    if shape.stored_vocab_size != shape.draft_vocab_size:
        rows = dict.fromkeys(shape.lm_head_names, target_ids)
        reader.tensors = replace(tensors, rows=rows)
    return MedusaHeads(shape, reader, rank, target_ids.to(rank.device))
