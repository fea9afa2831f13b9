"""Loading of one rank of a model from a checkpoint, for the selected kernel backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.config.engine import AdapterLimits, Kernels
from specdec.config.kv_cache import KVCacheDType
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, SlotMove
from specdec.kernels.reference.sample_rows import Argmax, RowArgmax, SampleParams
from specdec.kernels.reference.triton_availability import kv_dtype_fault
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.families.native_recurrence import kernels_of_hybrids, recurrence_fault
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.native_limits import native_fault
from specdec.models.config.recurrent import Recurrent
from specdec.models.cpu_decoder import NativeDecoder, NativeHybridDecoder
from specdec.models.determinism import require_deterministic
from specdec.models.dtypes import kv_dtype_of
from specdec.models.gemma4 import Gemma4Decoder
from specdec.models.hybrid import HybridDecoder
from specdec.models.llama import CausalDecoder
from specdec.models.lora.updates import AdapterStore
from specdec.models.weights.checkpoint import CPU, CheckpointReader, open_checkpoint
from specdec.models.weights.checks import check_tensors
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.types.errors import InvalidValueError, UnsupportedModelError

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """One rank of a decoder. The calls that compute are collective."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the model's activations."""
        ...

    @property
    def vocab_slice(self) -> range:
        """Tokens whose logits this rank computes."""
        ...

    def enable_adapters(self, limits: AdapterLimits | None = None) -> AdapterStore:
        """Return where adapters are loaded; call it once, before the first pass.

        Each token of a pass then runs with the adapter of its chunk. limits: to reserve memory for;
        None where it is taken as adapters are loaded.
        """
        ...

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Allocate a zeroed pool of `num_slots` tokens (whole blocks), in the decoder's layout."""
        ...

    def __call__(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        ...

    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Run the same pass, and also return the residual stream that enters some layers.

        taps: layers, from 0 (the embeddings) to num_layers (the output of the last layer before the
        final norm), in any order.
        """
        ...

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """Copy the KV of tokens, in all layers; no move overwrites the source of a later one."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        ...

    def compute_logits_and_argmax(self, hidden: Tensor, argmax: Argmax) -> tuple[Tensor, RowArgmax]:
        """Return this rank's logits and their argmax, by `argmax` or by a kernel that finds both.

        hidden: [R, hidden_size].
        """
        ...


@runtime_checkable
class WholeDraftDecoder(Decoder, Protocol):
    """A draft model that can draft all tokens in one call."""

    @property
    def can_draft(self) -> bool:
        """Return whether `draft` is available on this rank, and equally on all others.

        Where adapters can be loaded, `enable_adapters` comes first.
        """
        ...

    def draft(
        self, batch: ForwardBatch, kv_cache: Tensor, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """Run a batch, and draft `counts` tokens after each of B sequences.

        The KV of all of them but the last is written after the batch's. The tokens are the argmax
        of logits, without temperature; else of logits / temperature, cut by top_k, top_p and min_p,
        and the noise that the target uses for its token. With several ranks, params may not cut. A
        collective call.

        counts: above 0, [B]; the block tables have room for all but the last token. params: of the
        first token of each sequence, [B]. A draft ends early where the logits are not numbers.
        """
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
    output_tokens: Sequence[int] | None = None,
    deterministic: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Decoder:
    """Load one rank of the model in a Hugging Face directory.

    quantization: format of the matrices of linear layers; None for `dtype`, like the rest.
    kernels: with "auto" all ranks select the same backend, by a collective call.
    output_tokens: as in CausalDecoder. deterministic, kv_cache_dtype: as in EngineConfig.

    Raises InvalidValueError if "native" kernels are not available, and UnsupportedModelError if the
    device does not support the quantization or deterministic results of the model, or a rank has
    none of the output tokens.
    """
    if deterministic:
        require_deterministic(config, group, device)
    sizes = (max_model_len, block_size)
    if config.transformers is not None:
        return _load_transformers(
            directory, config, group, dtype, sizes, device, kernels, output_tokens, kv_cache_dtype
        )
    kernels = _kernels_of(kernels, config, device, max_model_len)
    backend = _select_backend(kernels, device, group, quantization, deterministic=deterministic)
    _require_kv_kernels(backend, device, kv_cache_dtype)
    reader = open_checkpoint(directory, dtype, quantization, device, backend)
    _require_tensors(config, reader, directory, group)
    kv_dtype = kv_dtype_of(dtype, kv_cache_dtype)
    model = _decoder_of(config)(config, reader, group, *sizes, output_tokens, kv_dtype)
    return _on_native_kernels(model) if backend is KernelBackend.CPU else model


def _decoder_of(config: ModelConfig) -> type[CausalDecoder]:
    if config.varied is not None:
        return Gemma4Decoder
    return CausalDecoder if config.recurrent is None else HybridDecoder


def _on_native_kernels(model: CausalDecoder) -> NativeDecoder:
    return NativeHybridDecoder(model) if isinstance(model, HybridDecoder) else NativeDecoder(model)


def _kernels_of_layers(kernels: Kernels, recurrent: Recurrent, device: torch.device) -> Kernels:
    """Return the kernels that the layers have. Raises InvalidValueError for others."""
    if device.type != "cpu":
        return kernels
    found = kernels_of_hybrids(kernels, recurrent)
    if found != kernels:
        logger.warning("using torch kernels: %s have no native kernel", recurrence_fault(recurrent))
    return found


def _kernels_of(
    kernels: Kernels, config: ModelConfig, device: torch.device, max_model_len: int
) -> Kernels:
    """Return torch for a model that the native decoder does not run on a CPU.

    Raises InvalidValueError for kernels or a device that do not run it.
    """
    if config.recurrent is not None:
        return _kernels_of_layers(kernels, config.recurrent, device)
    if config.varied is not None and device.type != "cpu":
        limit = "cpu: layers of different shapes run by torch on a CPU alone"
        raise InvalidValueError("device", device.type, limit)
    if device.type != "cpu":
        _require_short_context(config, max_model_len, device)
    fault = native_fault(config, max_model_len)
    if fault is None or device.type != "cpu" or kernels == "torch":
        return kernels
    if kernels != "auto":
        raise InvalidValueError("kernels", kernels, f"auto or torch: {fault} have no native kernel")
    logger.warning("using torch kernels: %s have no native kernel", fault)
    return "torch"


def _require_short_context(config: ModelConfig, max_model_len: int, device: torch.device) -> None:
    """Raise InvalidValueError for a context in which queries of a layer see a part on a device."""
    chunk, latent = config.traits.attention_chunk, config.latent
    limits = {} if chunk is None else {chunk: "a chunk of attention"}
    if latent is not None and latent.indexer is not None:
        limits[latent.indexer.num_chosen] = "the tokens that a query attends to"
    for longest, name in limits.items():
        if max_model_len > longest:
            limit = f"at most {longest}, {name}, on {device.type}"
            raise InvalidValueError("max_model_len", max_model_len, limit)


def _require_tensors(
    config: ModelConfig, reader: CheckpointReader, directory: Path, group: TensorParallelGroup
) -> None:
    """Check all tensors before one is read; the first rank logs those that nothing reads."""
    assert isinstance(reader.tensors, StoredTensors)
    found = check_tensors(
        reader.tensors, reader.weight_format, decoder_tensors(config, reader.tensors)
    )
    found.require()
    if group.rank == 0 and found.unused:
        logger.warning("nothing reads %s in %s", found.unused, directory)
    if group.rank == 0 and found.known_unused:
        logger.info("not used in %s: %s", directory, found.known_unused)


def _require_kv_kernels(
    backend: KernelBackend, device: torch.device, kv_cache_dtype: KVCacheDType
) -> None:
    """Raise InvalidValueError for KV that the kernels of a backend do not read."""
    if kv_cache_dtype == "auto":
        return
    if backend is KernelBackend.CPU:
        limit = "auto with the native kernels, which read keys and values of 16 and 32 bits"
        raise InvalidValueError("kv_cache_dtype", kv_cache_dtype, limit)
    found = kv_dtype_of(torch.float32, kv_cache_dtype)
    if backend.is_triton and (fault := kv_dtype_fault(device, found)):
        raise InvalidValueError("kv_cache_dtype", kv_cache_dtype, f"auto or fp8_e5m2: {fault}")


def _load_transformers(
    directory: Path,
    config: ModelConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    device: torch.device,
    kernels: Kernels,
    output_tokens: Sequence[int] | None,
    kv_cache_dtype: KVCacheDType,
) -> Decoder:
    """Load a model of transformers; sizes: max_model_len and block_size."""
    from specdec.models.transformers.transformers_decoder import (
        load_transformers,  # imports transformers
    )

    attention: Kernels = "torch" if device.type == "cpu" else kernels
    backend = KernelBackend.select(attention, device)
    _require_kv_kernels(backend, device, kv_cache_dtype)
    return load_transformers(
        directory,
        config,
        group,
        dtype=dtype,
        max_model_len=sizes[0],
        block_size=sizes[1],
        device=device,
        backend=backend,
        output_tokens=output_tokens,
        kv_dtype=kv_dtype_of(dtype, kv_cache_dtype),
    )


def _select_backend(
    kernels: Kernels,
    device: torch.device,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None,
    *,
    deterministic: bool,
) -> KernelBackend:
    backend = KernelBackend.select(kernels, device, deterministic=deterministic)
    if quantization is not None and device.type != "cpu" and not backend.is_triton:
        raise UnsupportedModelError(f"quantization {quantization} on {device} needs Triton")
    if kernels == "auto" and device.type == "cpu" and not deterministic:
        return _common_backend(backend, group)
    return backend


def _common_backend(backend: KernelBackend, group: TensorParallelGroup) -> KernelBackend:
    """Return the CPU backend if every rank selected it, else torch; a collective call.

    With different backends the ranks would all-reduce tensors of different shapes and types.
    """
    has_kernels = backend is KernelBackend.CPU
    of_ranks = group.all_gather(torch.tensor([has_kernels], dtype=torch.int32))
    if has_kernels and not of_ranks.all():
        logger.warning("rank %d uses torch: not all ranks have the CPU kernels", group.rank)
    return KernelBackend.CPU if of_ranks.all() else KernelBackend.TORCH
