"""The best children of nodes of draft trees: the definition, by whole rows of logits.

A child's rank is that of log q, or above temperature 0 of log q + g with the noise g that the
target will use, and its confidence follows from these scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.sample import torch_row_argmax
from specdec.sampling.device.device_sampler import (
    DeviceRules,
    perturbed_scores,
    sample_of,
    slabs_of,
)

NUM_WEIGHED = 32
"""Best tokens over which the confidences of a node's possible children sum to 1."""

_LOW_WORD = 2**32 - 1
_LOWEST = torch.finfo(torch.float64).min


class DeviceChildren(NamedTuple):
    """The best children of R nodes, best first.

    confidences: estimates of the probability that each is the target's token; 0 where there is no
    such child.
    """

    token_ids: Tensor  # [R, m] int64
    confidences: Tensor  # [R, m] float64

    def of(self, node: int) -> tuple[list[int], list[float]]:
        """Return the tokens and confidences of the children of one node."""
        is_child = self.confidences[node] > 0
        return self.token_ids[node][is_child].tolist(), self.confidences[node][is_child].tolist()


def best_children(
    logits: Tensor,
    rules: DeviceRules | None,
    count: int,
    *,
    on_host: bool = False,
) -> DeviceChildren:
    """Return the `count` best tokens of each row, the one of `sample_rows` first.

    A row whose logits have NaN, or no finite value, has none. Arguments as in `sample_rows`.
    """
    parts = [
        _children(logits[own], None if rules is None else rules[own], count, on_host=on_host)
        for own in slabs_of(logits)
    ]
    return DeviceChildren(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _children(
    logits: Tensor, rules: DeviceRules | None, count: int, *, on_host: bool
) -> DeviceChildren:
    is_invalid = sample_of(torch_row_argmax(logits)).is_invalid
    scores = logits.float()
    totals = scores.logsumexp(1, keepdim=True)
    largest = _selected if on_host else _largest
    if rules is None:
        values, token_ids = largest(scores, count)
        confidences = confidences_of_logits(values.double(), totals.double())
    else:
        is_noisy, most = (rules.temperatures > 0)[:, None], max(count, NUM_WEIGHED)
        perturbed = perturbed_scores(logits, rules, most, on_host=on_host)
        values, token_ids = largest(torch.where(is_noisy, perturbed, scores), most)
        confidences = torch.where(
            is_noisy,
            confidences_of_scores(values.double(), rules.temperatures.double()),
            confidences_of_logits(values.double(), totals.double()),
        )
    confidences = confidences[:, :count].masked_fill(is_invalid[:, None], 0)
    return DeviceChildren(token_ids[:, :count], confidences)


def confidences_of_scores(best: Tensor, temperatures: Tensor) -> Tensor:
    """Return the probability that each token is the target's, given the noise, [num_rows, n].

    The target takes the argmax of y / T + g; the draft knows g, and its logits z in place of y. If
    y - z is Gumbel noise of scale 1, the probability is softmax(z + T g), by the Gumbel-max trick
    (Maddison et al. 2014, arXiv 1411.0030, section 2). At a low temperature this is the softmax of
    the logits, as at temperature 0; at a high one the shared noise decides.

    best: z / T + g of the best tokens, up to a constant, [num_rows, n] float64, descending; -inf
    for no token, which gets 0; those of the first NUM_WEIGHED sum to 1, however many there are.
    temperatures: T of each row, [num_rows] float64, above 0.
    """
    differences = best - best[:, :1].clamp_min(_LOWEST)
    weights = (differences * temperatures[:, None]).exp()
    total = weights[:, :NUM_WEIGHED].sum(1, keepdim=True)
    confidences: Tensor = weights / total.clamp_min(1)
    return confidences


def confidences_of_logits(best: Tensor, totals: Tensor) -> Tensor:
    """Return the probabilities of the best tokens of rows without noise, [num_rows, n] float64.

    best: their logits, [num_rows, n] float64. totals: logarithms of the sums of all tokens'
    weights, [num_rows, 1] float64.
    """
    return (best - totals.clamp_min(_LOWEST)).clamp_max(0).exp()


def _selected(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what `_largest` does, faster; of equal scores at the end any may be left out."""
    token_ids = scores.topk(min(count, scores.shape[1])).indices.sort(1).values
    best = scores.gather(1, token_ids).sort(dim=1, descending=True, stable=True)
    missing = (0, count - token_ids.shape[1])
    token_ids = F.pad(token_ids.gather(1, best.indices), missing)
    return F.pad(best.values, missing, value=-torch.inf), token_ids


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row, descending, and their tokens; [num_rows, count] each.

    Of equal scores the lower token comes first: both are ordered as one integer, the bits of a
    score and then those of the token. scores: [num_rows, num_tokens] float32. Missing tokens have
    the score -inf.
    """
    bits = (scores + 0.0).view(torch.int32)  # 0 for -0, its equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    tokens = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered.long() << 32) + (_LOW_WORD - tokens)
    best = keys.topk(min(count, scores.shape[1])).values
    token_ids, ordered = _LOW_WORD - (best & _LOW_WORD), (best >> 32).int()
    values = (ordered ^ (ordered >> 31 & 0x7FFFFFFF)).view(torch.float32)
    missing = (0, count - values.shape[1])
    return F.pad(values, missing, value=-torch.inf), F.pad(token_ids, missing)
