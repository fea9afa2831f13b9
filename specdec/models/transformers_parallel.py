"""Tensor parallelism of a model of transformers, by its own plan.

transformers applies `base_model_tp_plan` with DTensor, on process groups that it opens itself. Here
a rank cuts its part out of the linear layers that the plan names, and the group of ranks that every
model has adds the partial sums. Whether the plan fits the model's code is tested on a few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.transformers_attention import AttentionCalls, AttentionRecord
from specdec.models.transformers_config import BY_INPUTS, BY_OUTPUTS
from specdec.types.errors import UnsupportedModelError

_STYLES = (BY_OUTPUTS, BY_INPUTS)
"""Styles of layers that ranks divide; every rank has the others that are supported as a whole."""

_PROBE_TOKENS = 3
_MAX_ERROR = 0.05
"""Norm of the difference to the logits of the whole model, relative to theirs."""
_MAX_REASON_CHARS = 300


def divide(model: Any, body: Any, group: TensorParallelGroup, device: torch.device) -> range:
    """Leave this rank's part of a model on a device; return the tokens whose logits it computes.

    model: the whole `PreTrainedModel` in host memory, with an attention that probes. body: the
    module below the output head, to which the plan applies. A collective call. Raises
    UnsupportedModelError where the parts do not give the logits of the whole.
    """
    whole = _probe_logits(model)
    for layer, style in _planned(body):
        if style == BY_OUTPUTS:
            _keep_outputs(layer, group.share_of(layer.out_features))
        else:
            _keep_inputs(layer, group)
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


def _planned(body: Any) -> Iterator[tuple[nn.Linear, str]]:
    """Yield the layers that a plan names, with their styles.

    Raises UnsupportedModelError for a layer that is not linear.
    """
    plan = body.config.base_model_tp_plan
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\w+")), style) for name, style in plan.items()
    ]
    for name, module in body.named_modules():
        for pattern, style in patterns:
            if style in _STYLES and pattern.fullmatch(name):
                if not isinstance(module, nn.Linear):
                    raise UnsupportedModelError(
                        f"transformers' plan divides {name}, which is no linear layer"
                    )
                yield module, style


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
