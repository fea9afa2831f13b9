"""Decoder that runs the modelling code of transformers over paged KV.

The tokens of all sequences of a pass are one row of the model, each with its position; attention,
the only part where tokens see each other, runs over the KV cache by the plan of the batch
(`models.transformers.transformers_attention`). Every other operator is transformers' own, on torch.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast

from specdec.config.engine import AdapterLimits
from specdec.kernels import PagedAttention
from specdec.kernels.backend import KernelBackend, attention_kind
from specdec.kernels.moves import move_kv
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, SlotMove, on_device
from specdec.kernels.reference.sample_rows import Argmax, RowArgmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.transformers_config import parallel_plan
from specdec.models.lora.updates import AdapterStore
from specdec.models.transformers.transformers_attention import (
    PAGED,
    PROBE,
    AttentionCalls,
    AttentionRecord,
    LayerAttention,
    PagedPass,
)
from specdec.models.transformers.transformers_parallel import divide
from specdec.models.weights.checks import summary
from specdec.types.errors import UnsupportedModelError
from specdec.types.sharding import HeadShard
from specdec.types.validation import require_range

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 3
_MAX_REASON_CHARS = 300

_loading = threading.Lock()
"""`from_pretrained` changes globals: in a second thread a tied head would have no weights."""


class TransformersDecoder:
    """A model of transformers, whose attention reads and writes this project's KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        model: Any,
        max_model_len: int,
        block_size: int,
        backend: KernelBackend,
        output_tokens: Sequence[int] | None = None,
        tokens: range | None = None,
        num_ranks: int = 1,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """model: the `PreTrainedModel`, on its device. Other arguments: see `CausalDecoder`.

        tokens: whose logits this rank computes; None for all. num_ranks: that share the heads.

        Raises UnsupportedModelError for a model whose layers attend in a way that paged attention
        does not have.
        """
        require_range("max_model_len", max_model_len, 1, config.max_position_embeddings)
        self._config, self._backend = config, backend
        self._model = model.eval()
        self._calls = AttentionCalls(model)
        name = _body_name(model)
        self._body: Any = getattr(model, name)
        self._head = _OutputHead(model, name)
        self.dtype: torch.dtype = model.dtype
        self.kv_dtype = self.dtype if kv_dtype is None else kv_dtype
        self.device: torch.device = model.device
        self.vocab_slice = range(config.vocab_size) if tokens is None else tokens
        self.layers = self._record_layers(num_ranks)
        self._attentions = self._attention_of_layers(block_size)
        self._is_output: Tensor | None = None
        if output_tokens is not None:
            is_output = torch.zeros(config.vocab_size, dtype=torch.bool, device=self.device)
            is_output[torch.tensor(output_tokens, device=self.device)] = True
            self._is_output = is_output[self.vocab_slice.start : self.vocab_slice.stop]
        model.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def _record_layers(self, num_ranks: int) -> list[LayerAttention]:
        """Return how each layer attends, by a call of the model on a few tokens.

        Raises UnsupportedModelError where layers differ from the configuration, or where the output
        head reads more than the last hidden states.
        """
        tokens = torch.arange(_PROBE_TOKENS, device=self.device).unsqueeze(0)
        mask = torch.ones_like(tokens)  # without one, transformers looks for several texts
        inputs = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
        found = []
        for part in (self._model, self._body):
            record = AttentionRecord()
            with self._calls.using(record):
                found.append(part(**inputs, use_cache=False)[0][0])
        whole, headed = (each.float() for each in (found[0], self._head(found[1])))
        if not torch.allclose(whole, headed, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise UnsupportedModelError(
                f"{self._config.architecture} of transformers has logits of more than its last "
                "hidden states"
            )
        _require_layers(record.layers, self._config, num_ranks)
        return [
            replace(record.layers[index], window=_narrower(record.layers[index].window, window))
            for index, window in enumerate(self._config.sliding_windows)
        ]

    def _attention_of_layers(self, block_size: int) -> list[PagedAttention]:
        """Return the attention of each layer; those with the same scale and bound share one."""
        made: dict[tuple[float, float | None], PagedAttention] = {}
        for layer in self.layers:
            key = (layer.scale, layer.softcap)
            if key not in made:
                (heads,) = HeadShard.all_ranks(layer.num_heads, layer.num_kv_heads, 1)
                made[key] = attention_kind(self._backend)(
                    heads,
                    layer.key_dim,
                    block_size,
                    self.device,
                    scale=layer.scale,
                    softcap=layer.softcap,
                )
        return [made[layer.scale, layer.softcap] for layer in self.layers]

    def enable_adapters(self, limits: AdapterLimits | None = None) -> AdapterStore:
        """Raise UnsupportedModelError: adapters change the layers of this project's decoder."""
        raise UnsupportedModelError("LoRA adapters need a model that specdec's own decoder runs")

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Return zeros [num_layers, num_slots, 2, num_kv_heads, head_dim]."""
        first = self.layers[0]
        shape = (len(self.layers), num_slots, 2, first.num_kv_heads, first.key_dim)
        return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def __call__(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """See Decoder."""
        return self.forward(batch, kv_cache)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        windows = {layer.window for layer in self.layers}
        planner = self._attentions[0]
        plans = {window: planner.plan(batch, self.dtype, Visible(window)) for window in windows}
        run = PagedPass(self.layers, self._attentions, kv_cache, plans)
        input_ids, positions = (
            on_device(indices, self.device) for indices in (batch.input_ids, batch.positions)
        )
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
        with self._calls.using(run):
            hidden: Tensor = self._body(**inputs, use_cache=False)[0][0]
        return hidden

    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Raise UnsupportedModelError for taps: draft heads need this project's decoder."""
        if taps:
            raise UnsupportedModelError("taps need a model that specdec's own decoder runs")
        hidden = self.forward(batch, kv_cache)
        return HiddenStates(hidden, hidden.new_empty(len(hidden), 0, hidden.shape[1]))

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """See Decoder."""
        move_kv(kv_cache, moves, self._backend)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)] in float32; hidden: [R, hidden_size]."""
        logits = self._head(hidden).float()
        if self._is_output is not None:
            logits = logits.masked_fill(~self._is_output, float("-inf"))
        return logits

    def compute_logits_and_argmax(self, hidden: Tensor, argmax: Argmax) -> tuple[Tensor, RowArgmax]:
        """See Decoder."""
        logits = self.compute_logits(hidden)
        return logits, argmax(logits)


def _body_name(model: Any) -> str:
    """Return the name of the module below the output head."""
    return str(model.base_model_prefix) if hasattr(model, model.base_model_prefix) else "model"


class _OutputHead:
    """The output head of a model, with the factors and bounds of logits that belong to it."""

    def __init__(self, model: Any, body: str) -> None:
        """Copy the outer module of `model`, with a body that returns its input embeddings.

        body: name of its body.
        """
        self._whole = copy.copy(model)
        self._whole._modules = {**model._modules, body: _GivenHiddenStates()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size]; hidden: the last hidden states [R, hidden_size]."""
        logits: Tensor = self._whole(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits


class _GivenHiddenStates(nn.Module):
    """Body of a model whose last hidden states are its input embeddings."""

    @property
    def decoder(self) -> nn.Module:
        """The module that OPT calls in place of its body."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return _BodyOutput(last_hidden_state=inputs_embeds)


class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc]  # untyped in transformers
    """Output of a body, with the fields of all kinds of models."""

    cross_attentions: None = None


def _narrower(window: int | None, limit: int | None) -> int | None:
    """Return the smaller of two windows; None: no limit."""
    return min((each for each in (window, limit) if each is not None), default=None)


def _require_layers(
    layers: Mapping[int, LayerAttention], config: ModelConfig, num_ranks: int
) -> None:
    if set(layers) != set(range(config.num_layers)):
        raise UnsupportedModelError(
            f"{config.architecture} has {config.num_layers} layers, of which {len(layers)} attend; "
            "all have to"
        )
    heads = (config.num_heads // num_ranks, config.num_kv_heads // num_ranks)
    expected = (*heads, config.head_dim)
    for index, layer in layers.items():
        sizes = (layer.num_heads, layer.num_kv_heads, layer.key_dim)
        if sizes != expected or layer.value_dim > layer.key_dim:
            raise UnsupportedModelError(
                f"layer {index} of {config.architecture} has (heads, KV heads, head_dim) {sizes} "
                f"and values of {layer.value_dim}; its configuration has {expected}"
            )


def load_transformers(
    directory: Path,
    config: ModelConfig,
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    block_size: int,
    device: torch.device,
    backend: KernelBackend,
    output_tokens: Sequence[int] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> TransformersDecoder:
    """Load a model of transformers; for the arguments see `loading.load_model`.

    backend: of attention. Each rank of a group reads the whole model, and keeps its part. Raises
    UnsupportedModelError for a model that cannot be run, and for a checkpoint without some of its
    tensors.
    """
    model = _read_model(directory, dtype, device)
    tokens = None
    if group.size > 1:
        of_model = config.transformers
        divides_by_expert = of_model is not None and of_model.is_divided_by_expert
        body = getattr(model, _body_name(model))
        plan = parallel_plan(body.config, divides_by_expert=divides_by_expert)
        tokens = divide(model.eval(), body, plan, group, device)
    return TransformersDecoder(
        config,
        model.to(device),
        max_model_len,
        block_size,
        backend,
        output_tokens,
        tokens,
        group.size,
        kv_dtype,
    )


def _read_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model of transformers, on the CPU."""
    # Grouped products need widths that are multiples of 16 bytes, and save launches on a GPU only.
    experts = {"experts_implementation": "eager"} if device.type == "cpu" else {}
    try:
        with _loading:
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=PROBE,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **experts,
            )
    except Exception as error:  # transformers raises any exception for invalid files
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(f"transformers cannot load {directory}: {reason}") from error
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModelError(f"{directory} has no tensor {missing[0]}")
    if unused := sorted(found["unexpected_keys"]):
        logger.warning("nothing reads %s in %s", summary(unused), directory)
    return model
