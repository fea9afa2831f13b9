"""Log-probabilities of tokens over a vocabulary that is split across ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling.chunks import ScoreChunks
from specdec.sampling.gumbel import CHUNK_TOKENS
from specdec.types.messages import Logprobs


class _Best(NamedTuple):
    """The highest logits of each row; equal logits are ordered by token id."""

    logits: Tensor  # [num_rows, num_best]
    token_ids: Tensor  # like logits


def token_logprobs(
    logits: Tensor,  # [num_rows, num_tokens]
    token_ids: Tensor,  # [num_rows] int64
    num_best: int,
    group: TensorParallelGroup,
    first_token: int,
) -> Logprobs:
    """Return log-probabilities of one token and of the `num_best` most likely tokens of each row.

    A collective call. This rank holds the logits of the tokens from first_token on. Each rank sends
    its best tokens and its logsumexp, never its logits. NaN counts as -inf.
    """
    chunks = ScoreChunks.of_logits(logits, first_token)
    columns = (token_ids - first_token).clamp(0, logits.shape[1] - 1)
    is_held = token_ids == columns + first_token
    own = logits.gather(1, columns.unsqueeze(1)).squeeze(1).double()
    own.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).masked_fill_(~is_held, -torch.inf)
    total = chunks.scores.flatten(1).logsumexp(1).double()
    best = _best_here(chunks, num_best)
    offered = torch.cat([total.unsqueeze(1), own.unsqueeze(1), *best], dim=1)
    of_ranks = group.all_gather(offered)  # [size, num_rows, 2 + 2 * num_best] float64
    total, own = of_ranks[:, :, 0].logsumexp(0), of_ranks[:, :, 1].amax(0)
    best = _best_of_ranks(of_ranks[:, :, 2:], num_best)
    num_better = (chunks.scores > own.float()[:, None, None]).sum((1, 2))
    values = torch.cat([own.unsqueeze(1), best.logits], dim=1) - total.unsqueeze(1)
    ids = torch.cat([token_ids.double().unsqueeze(1), best.token_ids], dim=1)
    return Logprobs(
        ids.int().cpu().numpy(),
        values.float().cpu().numpy(),
        group.all_reduce(num_better).add_(1).int().cpu().numpy(),
    )


def _best_here(chunks: ScoreChunks, num_best: int) -> _Best:
    """Return this rank's best tokens, float64; -inf where it has fewer.

    They are in the `num_best` chunks with the highest maxima, equal maxima by id: for a token in
    any other chunk, each of these chunks has a better token.
    """
    order = chunks.maxima.sort(dim=1, descending=True, stable=True).indices
    columns = order[:, :num_best].sort(dim=1).values  # so that tokens stay in order
    rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
    scores = chunks.scores[rows, columns].flatten(1)
    offsets = torch.arange(CHUNK_TOKENS, device=columns.device)
    token_ids = ((chunks.first_chunk + columns).unsqueeze(2) * CHUNK_TOKENS + offsets).flatten(1)
    missing = max(0, num_best - scores.shape[1])
    scores = pad(scores, (0, missing), value=-torch.inf)
    token_ids = pad(token_ids, (0, missing))
    return _first(scores.double(), token_ids.double(), num_best)


def _best_of_ranks(offered: Tensor, num_best: int) -> _Best:
    """Return the best tokens of all ranks; offered: [size, num_rows, 2 * num_best].

    A higher rank has higher token ids.
    """
    by_row = offered.transpose(0, 1)
    logits, token_ids = by_row[:, :, :num_best], by_row[:, :, num_best:]
    return _first(logits.flatten(1), token_ids.flatten(1), num_best)


def _first(logits: Tensor, token_ids: Tensor, num_best: int) -> _Best:
    """Return the `num_best` first; both are [num_rows, num_tokens], equal logits in id order."""
    ordered = logits.sort(dim=1, descending=True, stable=True)
    return _Best(ordered.values[:, :num_best], token_ids.gather(1, ordered.indices)[:, :num_best])
