"""Log-probabilities of output and prompt tokens, over a vocabulary that is split across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.gumbel import CHUNK_TOKENS
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard
from specdec.types.messages import Logprobs, StepRow

_SLAB_LOGITS = 2**24
"""Maximum number of copied logits in memory at once: 64 MiB of float32 over all ranks."""


class _Best(NamedTuple):
    """The highest logits of each row; equal logits are ordered by token id."""

    logits: Tensor  # [num_rows, num_best]
    token_ids: Tensor  # like logits


class LogprobTensors(NamedTuple):
    """The fields of Logprobs, on the device."""

    token_ids: Tensor  # [num_rows, 1 + num_best] int32
    logprobs: Tensor  # [num_rows, 1 + num_best] float32
    ranks: Tensor  # [num_rows] int32


def token_logprobs(
    logits: Tensor,  # [num_rows, num_tokens]
    tokens: Sequence[int],  # [num_rows]
    num_best: int,
    shard: VocabShard,
) -> Logprobs:
    """Return log-probabilities of one token and of the `num_best` most likely tokens of each row.

    A collective call.
    """
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    found = device_logprobs(logits, token_ids, num_best, shard)
    return Logprobs(*(each.cpu().numpy() for each in found))


def device_logprobs(
    logits: Tensor,  # [num_rows, num_tokens]
    token_ids: Tensor,  # [num_rows] int64
    num_best: int,
    shard: VocabShard,
) -> LogprobTensors:
    """Return what `token_logprobs` does, without a value that the host has to read.

    A collective call. Each rank sends its best tokens and its logsumexp, never its logits. NaN
    counts as -inf.
    """
    group, num_best = shard.group, min(num_best, shard.vocab_size)
    chunks = ScoreChunks.of_logits(logits, shard.first_token)
    columns = (token_ids - shard.first_token).clamp(0, logits.shape[1] - 1)
    is_held = token_ids == columns + shard.first_token
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
    return LogprobTensors(ids.int(), values.float(), group.all_reduce(num_better).add_(1).int())


def logprob_table(
    logits: Tensor,  # [num_rows, num_tokens]
    rows: Tensor,  # [N] int64
    token_ids: Tensor,  # [N] int64
    num_best: int,
    shard: VocabShard,
) -> Tensor:
    """Return the log-probabilities of a token of each of `rows`, in slabs, as one tensor.

    Returns [N, 1 + 2 * (1 + num_best)] int32: the rank, the tokens, and the bits of their
    log-probabilities. A collective call that reads no value.
    """
    step = max(1, _SLAB_LOGITS // shard.vocab_size)
    parts = []
    for start in range(0, len(rows), step):
        slab = slice(start, start + step)
        found = device_logprobs(logits[rows[slab]], token_ids[slab], num_best, shard)
        columns = (found.ranks[:, None], found.token_ids, found.logprobs.view(torch.int32))
        parts.append(torch.cat(columns, 1))
    return torch.cat(parts)


def prompt_logprobs(
    hidden: Tensor,  # [len(tokens), hidden_size]
    tokens: Sequence[int],
    num_best: int,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> Logprobs:
    """Return log-probabilities of prompt tokens, in slabs: all logits could exceed memory."""
    step = max(1, _SLAB_LOGITS // shard.vocab_size)
    slabs = (slice(start, start + step) for start in range(0, len(tokens), step))
    return Logprobs.join(
        [token_logprobs(compute_logits(hidden[i]), tokens[i], num_best, shard) for i in slabs]
    )


class KeptLogits:
    """The model's own logits of the rows that request log-probabilities, kept until verified."""

    def __init__(
        self, logits: Tensor, rows: Sequence[StepRow], num_best: Sequence[int | None]
    ) -> None:
        """Copy the needed rows of `logits`; a step row has num_draft_tokens + 1 of them.

        num_best: number of most likely tokens that each row requests; None: no log-probabilities.
        """
        self._num_best = {
            row.seq_id: count
            for row, count in zip(rows, num_best, strict=True)
            if count is not None
        }
        kept: list[int] = []
        self._places: dict[int, int] = {}  # of the logits after the last known token
        end = 0
        for row in rows:
            start, end = end, end + row.num_draft_tokens + 1
            if row.seq_id in self._num_best:
                self._places[row.seq_id] = len(kept)
                kept.extend(range(start, end))
        self._logits = logits[kept] if kept else None

    def logprobs(
        self, output: Sequence[tuple[StepRow, tuple[int, ...]]], shard: VocabShard
    ) -> dict[int, Logprobs]:
        """Return log-probabilities by sequence; output: rows with their new tokens."""
        kept = [(row, ids) for row, ids in output if ids and row.seq_id in self._places]
        if self._logits is None or not kept:
            return {}
        rows = [place for row, ids in kept for place in self._places_of(row, ids)]
        tokens = [token for _, ids in kept for token in ids]
        chosen = [(row.seq_id, ids) for row, ids in kept]
        most = max(self._num_best[seq_id] for seq_id, _ in chosen)
        return dict(self._split(token_logprobs(self._logits[rows], tokens, most, shard), chosen))

    def _places_of(self, row: StepRow, token_ids: Sequence[int]) -> list[int]:
        """Return the places of the logits of a row's new tokens: the base, then the drafts."""
        first = self._places[row.seq_id]
        return [first, *(first + 1 + node for node in row.accepted_drafts(token_ids[:-1]))]

    def _split(
        self, logprobs: Logprobs, chosen: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[int, Logprobs]]:
        end = 0
        for seq_id, tokens in chosen:
            start, end = end, end + len(tokens)
            yield seq_id, logprobs[start:end].best(self._num_best[seq_id])


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
