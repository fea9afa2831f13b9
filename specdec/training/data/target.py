"""The target as a teacher: its hidden states over whole samples, and its logits.

Both are computed by the decoder that serves, with its kernels and in its precision, so a drafter
learns from the features and the distributions that it will be served with. The exception is the
attention of a GPU: samples are computed at once, by torch's kernels, without pages of a KV cache.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config.engine import DTypeName, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.methods import trained_drafters
from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, HiddenStates
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import LogitTransform
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.dtypes import DTYPES
from specdec.models.layers.linear import transform_logits
from specdec.models.layers.matrix import Matrix, make_matrix
from specdec.models.llama import CausalDecoder
from specdec.models.loading import Decoder, load_model
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter
from specdec.models.weights.checkpoint import CPU, open_checkpoint
from specdec.training.data.batches import Batch
from specdec.training.data.whole_samples import use_whole_samples
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.messages import BASE_MODEL

_BLOCK_SIZE = 16
_ADAPTER_ID = BASE_MODEL + 1
_ROPE_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
)
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetPrecision:
    """The precision in which a target is served; see `specdec.models.loading.load_model`."""

    dtype: DTypeName = "float32"
    quantization: QuantizationMethod | None = None
    kernels: Kernels = "auto"

    @classmethod
    def on(
        cls,
        device: torch.device,
        dtype: DTypeName | None = None,
        quantization: QuantizationMethod | None = None,
        kernels: Kernels = "auto",
    ) -> TargetPrecision:
        """Return the precision on a device. dtype: None for float32 on a CPU, bfloat16 on a GPU.

        Raises InvalidValueError for a quantization or kernels that the device does not have.
        """
        if device.type != "cpu":
            if quantization is not None:
                limit = f"left out where device is {device}: it runs on a CPU"
                raise InvalidValueError("quantization", quantization, limit)
            if kernels == "native":
                limit = f"auto, triton or torch where device is {device}: they run on a CPU"
                raise InvalidValueError("kernels", kernels, limit)
        return cls(
            dtype or ("float32" if device.type == "cpu" else "bfloat16"), quantization, kernels
        )

    def as_settings(self) -> dict[str, str]:
        """Return the settings of an engine that serves it."""
        quantization = self.quantization or "none"
        return {"dtype": self.dtype, "quantization": quantization, "kernels": self.kernels}


@dataclass(frozen=True)
class OutputRows:
    """The rows of the served output head for some tokens.

    matrix: [V, hidden_size], in the format that is served. dtype: of the decoder's hidden states.
    transform: of the products, to logits.
    """

    matrix: Matrix
    dtype: torch.dtype
    transform: LogitTransform

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of these tokens, [R, V] float32; hidden: [R, hidden_size]."""
        products = self.matrix.multiply_to_float32(hidden.to(self.dtype))
        return transform_logits(self.transform, products)


class Target:
    """A loaded target.

    adapter_hash: fingerprint of the adapter with which it runs; empty without one.
    embedding: [vocab_size, hidden_size] float32 on the host. lm_head: the same shape, the same
    tensor if tied; it is not quantized. `output_rows` computes the logits that are served.
    """

    def __init__(
        self,
        directory: Path,
        max_model_len: int,
        precision: TargetPrecision,
        name: str | None = None,
        device: torch.device = CPU,
        adapter: Path | None = None,
    ) -> None:
        """Load the target for samples of up to `max_model_len` tokens.

        name: by which `resolve` finds it everywhere; None for the path of the directory. device: of
        the decoder, its hidden states and `output_rows`. adapter: directory of one with which it
        runs. Raises as `load_model` and `load_adapter` do.
        """
        self.directory, self.precision, self.device = directory, precision, device
        self.name = name or str(directory.resolve())
        self.config = _read_config(directory)
        self.decoder = self._load_decoder(max_model_len)
        self._adapter_id = BASE_MODEL if adapter is None else _ADAPTER_ID
        self.adapter_hash = "" if adapter is None else self._load_adapter(adapter)
        self._reader = open_checkpoint(directory, torch.float32)
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embedding = self.weight(_EMBEDDING, shape)
        is_tied = self.config.tie_word_embeddings
        self.lm_head = self.embedding if is_tied else self.weight(_LM_HEAD, shape)
        self._kv_cache = torch.empty(0)
        self._num_slots = 0
        decoder, is_on_gpu = self.decoder, device.type != "cpu"
        is_whole = is_on_gpu and isinstance(decoder, CausalDecoder) and use_whole_samples(decoder)
        self._has_cache = not is_whole

    def _load_decoder(self, max_model_len: int) -> Decoder:
        precision = self.precision
        return load_model(
            self.directory,
            self.config,
            TensorParallelGroup(),
            dtype=DTYPES[precision.dtype],
            max_model_len=max_model_len,
            block_size=_BLOCK_SIZE,
            quantization=precision.quantization,
            device=self.device,
            kernels=precision.kernels,
        )

    def _load_adapter(self, directory: Path) -> str:
        """Load the adapter with which all tokens run; return its fingerprint."""
        files = AdapterFiles.read(directory)
        load_adapter(self.decoder.enable_adapters(), self._adapter_id, files)
        return files.fingerprint

    @property
    def layer_fields(self) -> dict[str, Any]:
        """The keys of config.json of decoder layers with its sizes and rotary positions.

        Raises UnsupportedModelError where its layers are not Llama's, as a drafter's are.
        """
        model = self.config
        if not model.has_llama_layers:
            names = [name for name, each in trained_drafters().items() if not each.has_layers]
            raise UnsupportedModelError(
                f"layers of {model.architecture} differ from a drafter's, which are Llama's; the "
                f"methods {' and '.join(names)} have none"
            )
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": model.rms_norm_eps,
            "max_position_embeddings": model.max_position_embeddings,
            **self._fields(_ROPE_FIELDS),
        }

    @property
    def token_fields(self) -> dict[str, Any]:
        """The keys of config.json with ids of special tokens."""
        return self._fields(_TOKEN_FIELDS)

    @property
    def vocabulary_tensors(self) -> tuple[str, ...]:
        """The names of the tensors with a row for each token."""
        return (_EMBEDDING,) if self.config.tie_word_embeddings else (_EMBEDDING, _LM_HEAD)

    @property
    def text_files(self) -> tuple[str, ...]:
        """The names of the files of tokenizer and generation, for a model with its vocabulary."""
        return tuple(name for name in _TEXT_FILES if (self.directory / name).is_file())

    def _fields(self, names: Sequence[str]) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return {name: raw[name] for name in names if raw.get(name) is not None}

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor of the checkpoint, in float32 on the host."""
        return self._reader.read(name, shape).clone()

    def output_rows(self, token_ids: Tensor) -> OutputRows:
        """Return the output head for some tokens, [V] int64, as the decoder holds it.

        A row's logits do not depend on the other rows, so they are those that are served.
        """
        precision = self.precision
        backend = KernelBackend.select(precision.kernels, self.device)
        reader = open_checkpoint(
            self.directory, DTYPES[precision.dtype], precision.quantization, self.device, backend
        )
        name = _EMBEDDING if self.config.tie_word_embeddings else _LM_HEAD
        shape = (self.config.vocab_size, self.config.hidden_size)
        rows = reader.read(name, shape, dtype=reader.exact_dtype(name))[token_ids.to(self.device)]
        matrix = make_matrix(
            [rows],
            (len(token_ids), shape[1]),
            reader.dtype,
            quantization=precision.quantization,
            backend=backend,
        )
        is_native = isinstance(self.decoder, NativeDecoder)
        dtype = torch.float32 if is_native else reader.dtype
        return OutputRows(matrix, dtype, self.config.traits.logits)

    def hidden_states(self, batch: Batch, taps: Sequence[int]) -> HiddenStates:
        """Run the target over the T tokens of a batch; see `Decoder.forward_with_taps`.

        The result is float32 on the target's device, wherever the batch is.
        """
        chunks, num_blocks = list[Chunk](), 0
        token_ids = batch.host.token_ids.tolist()
        for span in batch.spans:
            count = -(-span.num_tokens // _BLOCK_SIZE)
            table = array("i", range(num_blocks, num_blocks + count))
            chunk = Chunk(token_ids[span.tokens], 0, table, adapter_id=self._adapter_id)
            chunks.append(chunk)
            num_blocks += count
        num_slots = num_blocks * _BLOCK_SIZE if self._has_cache else 1
        if num_slots > self._num_slots:
            self._num_slots = num_slots
            self._kv_cache = self.decoder.new_kv_cache(num_slots)
        forward_batch = ForwardBatch(chunks, _BLOCK_SIZE)
        found = self.decoder.forward_with_taps(forward_batch, self._kv_cache, taps)
        # Copies: autograd does not save tensors that were made in inference mode.
        return HiddenStates(*(each.float().clone() for each in found))


def _read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a target. Raises UnsupportedModelError for layers of some kinds."""
    config = ModelConfig.from_directory(directory)
    kinds = {
        "recurrent layers": config.recurrent is not None,
        "layers of different shapes": config.varied is not None,
    }
    for kind, is_found in kinds.items():
        if is_found:
            raise UnsupportedModelError(f"{config.architecture}: no drafter is trained for {kind}")
    return config
