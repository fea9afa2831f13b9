"""Tensor parallelism of a model of transformers, by its own plan.

transformers applies `base_model_tp_plan` with DTensor, on process groups that it opens itself. Here
a rank cuts its part out of the linear layers and experts that the plan names, and the group of
ranks that every model has adds the partial sums. Whether the plan fits the model's code is tested
on a few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.transformers_config import (
    BY_EXPERT,
    BY_INPUTS,
    BY_OUTPUTS,
    PACKED_BY_INPUTS,
    PACKED_BY_OUTPUTS,
    ROUTED_EXPERTS,
    SUMMED_EXPERTS,
)
from specdec.models.transformers.transformers_attention import AttentionCalls, AttentionRecord
from specdec.types.errors import UnsupportedModelError

_OUTPUTS, _INPUTS, _EXPERTS = -2, -1, 0
_DIMENSIONS = {
    BY_OUTPUTS: _OUTPUTS,
    PACKED_BY_OUTPUTS: _OUTPUTS,
    BY_INPUTS: _INPUTS,
    PACKED_BY_INPUTS: _INPUTS,
    BY_EXPERT: _EXPERTS,
}
"""The dimension of a tensor of experts, [experts, outputs, inputs], that a style divides."""

_PACKED = (PACKED_BY_OUTPUTS, PACKED_BY_INPUTS)
_OF_MIXTURES = (SUMMED_EXPERTS, ROUTED_EXPERTS)

_PROBE_TOKENS = 3
_MAX_ERROR = 0.05
"""Norm of the difference to the logits of the whole model, relative to theirs."""
_MAX_REASON_CHARS = 300


def divide(
    model: Any, body: Any, plan: Mapping[str, str], group: TensorParallelGroup, device: torch.device
) -> range:
    """Leave this rank's part of a model on a device; return the tokens whose logits it computes.

    model: the whole `PreTrainedModel` in host memory, with an attention that probes. body: the
    module below the output head, to which the plan applies. plan: see `parallel_plan`. A collective
    call. Raises UnsupportedModelError where the parts do not give the logits of the whole.
    """
    whole = _probe_logits(model)
    for part in list(_planned(body, plan)):
        _divide_part(part, group)
    tokens = group.share_of(whole.shape[1])
    _keep_outputs(model.get_output_embeddings(), tokens)
    model.to(device)
    try:
        own = _probe_logits(model).cpu()
    except Exception as error:  # of any type: it is the model's code
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(f"transformers' plan does not fit: {reason}") from error
    expected = whole[:, tokens.start : tokens.stop]
    difference = (own - expected).norm() if own.shape == expected.shape else torch.inf
    if not difference <= _MAX_ERROR * expected.norm():  # true of NaN
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} has other logits by transformers' plan; use one rank")
    return tokens


@torch.inference_mode()
def _probe_logits(model: Any) -> Tensor:
    """Return the logits of a few tokens, [_PROBE_TOKENS, tokens of this rank] float32."""
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0)
    with AttentionCalls(model).using(AttentionRecord()):
        inputs = {"position_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        logits: Tensor = model(input_ids=tokens, **inputs, use_cache=False).logits[0]
    return logits.float()


class _Part(NamedTuple):
    """A part of a model that a plan names.

    tensor: the name in its module of a tensor that is no layer; None for a module.
    """

    name: str
    module: nn.Module
    tensor: str | None
    style: str


def _planned(body: Any, plan: Mapping[str, str]) -> Iterator[_Part]:
    """Yield the parts that a plan names and that ranks divide, each module after its tensors.

    Every rank has the others as a whole.
    """
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\w+")), style)
        for name, style in plan.items()
        if style in _DIMENSIONS or style in _OF_MIXTURES
    ]

    def styles(name: str) -> Iterator[str]:
        return (style for pattern, style in patterns if pattern.fullmatch(name))

    for name, _ in body.named_parameters():
        owner, _, tensor = name.rpartition(".")
        for style in styles(name):
            yield _Part(name, body.get_submodule(owner), tensor, style)
    for name, module in body.named_modules():
        for style in styles(name):
            yield _Part(name, module, None, style)


def _divide_part(part: _Part, group: TensorParallelGroup) -> None:
    """Leave this rank's share of a part.

    Raises UnsupportedModelError for a style that the kind of the part does not have.
    """
    module, style = part.module, part.style
    if part.tensor is not None and style in _DIMENSIONS:
        _keep_share(module, part.tensor, style, group)
    elif part.tensor is None and style == SUMMED_EXPERTS:
        module.register_forward_hook(partial(_sum_results, group))
    elif part.tensor is None and style == ROUTED_EXPERTS:
        _run_own_experts(module, group)
    elif part.tensor is None and isinstance(module, nn.Linear) and style == BY_OUTPUTS:
        _keep_outputs(module, group.share_of(module.out_features))
    elif part.tensor is None and isinstance(module, nn.Linear) and style == BY_INPUTS:
        _keep_inputs(module, group)
    else:
        kind = "tensor" if part.tensor is not None else type(module).__name__
        raise UnsupportedModelError(
            f"transformers' plan divides {part.name}, a {kind}, as {style}, which is not supported"
        )


def _keep_share(module: nn.Module, name: str, style: str, group: TensorParallelGroup) -> None:
    """Keep this rank's share of a tensor, of each half where two are packed.

    A bias of outputs has these alone; one after divided inputs is whole.
    """
    tensor = cast(Tensor, getattr(module, name))
    dim = _DIMENSIONS[style]
    if tensor.ndim == 1:
        if dim == _INPUTS:
            return
        dim = 0
    halves = tensor.chunk(2 if style in _PACKED else 1, dim)
    own = group.share_of(halves[0].shape[dim])
    kept = [each.narrow(dim, own.start, len(own)) for each in halves]
    setattr(module, name, _parameter(torch.cat(kept, dim)))


def _sum_results(group: TensorParallelGroup, _: nn.Module, __: Any, results: Tensor) -> Tensor:
    """Return the results of experts, of whose hidden units each rank has a share."""
    return group.all_reduce(results.contiguous())


def _run_own_experts(experts: Any, group: TensorParallelGroup) -> None:
    """Let a mixture run this rank's experts alone, and add up the results of all ranks.

    The mixture skips an expert with the index after its last one, as the code of transformers
    does in its own expert parallelism.
    """
    own, run = group.share_of(experts.num_experts), experts.forward

    def run_own(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        is_own = (chosen >= own.start) & (chosen < own.stop)
        local = torch.where(is_own, chosen - own.start, len(own))
        results: Tensor = run(hidden, local, weights.masked_fill(~is_own, 0.0))
        return group.all_reduce(results.contiguous())

    experts.forward, experts.num_experts, experts._is_expert_parallel = run_own, len(own), True


def _keep_outputs(layer: nn.Linear, rows: range) -> None:
    own = slice(rows.start, rows.stop)
    layer.weight = _parameter(layer.weight[own])
    if layer.bias is not None:
        layer.bias = _parameter(layer.bias[own])
    layer.out_features = len(rows)


def _keep_inputs(layer: nn.Linear, group: TensorParallelGroup) -> None:
    """Keep this rank's inputs; the sum of all ranks, and then the bias, is the layer's output."""
    columns = group.share_of(layer.in_features)
    layer.weight = _parameter(layer.weight[:, columns.start : columns.stop])
    layer.in_features = len(columns)
    bias = cast("Tensor | None", layer.bias)
    layer.register_parameter("bias", None)
    layer.register_buffer("summed_bias", None if bias is None else bias.detach(), persistent=False)
    layer.register_forward_hook(partial(_add_ranks, group))


def _add_ranks(group: TensorParallelGroup, layer: nn.Linear, _: Any, partial_sum: Tensor) -> Tensor:
    total = group.all_reduce(partial_sum.contiguous())
    bias = cast("Tensor | None", layer.summed_bias)
    return total if bias is None else total + bias


def _parameter(part: Tensor) -> nn.Parameter:
    """Return a copy of a part, so that the whole is freed."""
    return nn.Parameter(part.detach().clone(), requires_grad=False)
