"""Log-probabilities of output and prompt tokens, over a vocabulary that is split across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.gumbel import CHUNK_TOKENS
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import Logprobs, StepRow
from specdec.types.sampling.sampling_spec import ListedTokens

SLAB_LOGITS = 2**24
"""Maximum number of copied logits in memory at once: 64 MiB of float32 over all ranks."""


class _Best(NamedTuple):
    """The highest logits of each row; equal logits are ordered by token id."""

    logits: Tensor  # [num_rows, num_best]
    token_ids: Tensor  # like logits


class LogprobTensors(NamedTuple):
    """The fields of Logprobs, on the device."""

    token_ids: Tensor  # [num_rows, 1 + num_best + num_given] int32
    logprobs: Tensor  # [num_rows, 1 + num_best + num_given] float32
    ranks: Tensor  # [num_rows] int32


def token_logprobs(
    logits: Tensor,  # [num_rows, num_tokens]
    tokens: Sequence[int],  # [num_rows]
    num_best: int,
    shard: VocabShard,
    given: Sequence[Sequence[int]] = (),  # [num_rows, num_given]
) -> Logprobs:
    """Return log-probabilities of one token and of the `num_best` most likely tokens of each row.

    given: further tokens of each row; none for none in any row. A collective call.
    """
    num_given = len(given[0]) if given else 0
    own, others = (
        torch.tensor(each, dtype=torch.int64, device=logits.device) for each in (tokens, given)
    )
    found = device_logprobs(logits, own, num_best, shard, others if num_given else None)
    token_ids, logprobs, ranks = (each.cpu().numpy() for each in found)
    return Logprobs(token_ids, logprobs, ranks, num_given)


def padded(listed: Iterable[ListedTokens]) -> list[list[int]]:
    """Return the given tokens of each, with token 0 up to the greatest number of them."""
    given = [each.token_ids for each in listed]
    most = max(map(len, given), default=0)
    return [[*tokens, *[0] * (most - len(tokens))] for tokens in given]


def device_logprobs(
    logits: Tensor,  # [num_rows, num_tokens]
    token_ids: Tensor,  # [num_rows] int64
    num_best: int,
    shard: VocabShard,
    given: Tensor | None = None,  # [num_rows, num_given] int64
) -> LogprobTensors:
    """Return what `token_logprobs` does, without a value that the host has to read.

    A collective call. Each rank sends its best tokens and its logsumexp, never its logits. NaN
    counts as -inf.
    """
    group, num_best = shard.group, min(num_best, shard.vocab_size)
    scores = logits[:, : shard.vocab_size - shard.first_token].to(torch.float32, copy=True)
    scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    named = token_ids.unsqueeze(1)  # [num_rows, 1 + num_given], the row's own first
    if given is not None:
        named = torch.cat([named, given], dim=1)
    total = scores.logsumexp(1).double()
    best = _best_here(scores, num_best, shard.first_token)
    offered = torch.cat([total.unsqueeze(1), _named_here(logits, named, shard), *best], dim=1)
    of_ranks = group.all_gather(offered)  # [size, num_rows, 1 + num_named + 2 * num_best] float64
    end = 1 + named.shape[1]
    total, found = of_ranks[:, :, 0].logsumexp(0), of_ranks[:, :, 1:end].amax(0)
    best = _best_of_ranks(of_ranks[:, :, end:], num_best)
    num_better = (scores > found[:, :1].float()).sum(1)
    values = torch.cat([found[:, :1], best.logits, found[:, 1:]], dim=1) - total.unsqueeze(1)
    ids = torch.cat([named[:, :1], best.token_ids.long(), named[:, 1:]], dim=1)
    return LogprobTensors(ids.int(), values.float(), group.all_reduce(num_better).add_(1).int())


def logprob_table(
    logits: Tensor,  # [num_rows, num_tokens]
    rows: Tensor,  # [N] int64
    token_ids: Tensor,  # [N] int64
    num_best: int,
    shard: VocabShard,
    given: Tensor | None = None,  # [N, num_given] int64
) -> Tensor:
    """Return the log-probabilities of a token of each of `rows`, in slabs, as one tensor.

    Returns [N, 1 + 2 * (1 + num_best + num_given)] int32: the rank, the tokens, and the bits of
    their log-probabilities. A collective call that reads no value.
    """
    step = max(1, SLAB_LOGITS // shard.vocab_size)
    parts = []
    for start in range(0, len(rows), step):
        slab = slice(start, start + step)
        others = None if given is None else given[slab]
        found = device_logprobs(logits[rows[slab]], token_ids[slab], num_best, shard, others)
        columns = (found.ranks[:, None], found.token_ids, found.logprobs.view(torch.int32))
        parts.append(torch.cat(columns, 1))
    return torch.cat(parts)


def prompt_logprobs(
    hidden: Tensor,  # [len(tokens), hidden_size]
    tokens: Sequence[int],
    listed: ListedTokens,
    compute_logits: Callable[[Tensor], Tensor],
    shard: VocabShard,
) -> Logprobs:
    """Return log-probabilities of prompt tokens, in slabs: all logits could exceed memory."""
    step = max(1, SLAB_LOGITS // shard.vocab_size)
    slabs = (slice(start, start + step) for start in range(0, len(tokens), step))
    given = [listed.token_ids] * len(tokens)
    return Logprobs.join(
        [
            token_logprobs(compute_logits(hidden[i]), tokens[i], listed.num_best, shard, given[i])
            for i in slabs
        ]
    )


class KeptLogits:
    """The model's own logits of the rows that request log-probabilities, kept until verified."""

    def __init__(
        self, logits: Tensor, rows: Sequence[StepRow], listed: Sequence[ListedTokens | None]
    ) -> None:
        """Copy the needed rows of `logits`; a step row has num_draft_tokens + 1 of them.

        listed: what each row requests beside its own tokens; None: no log-probabilities.
        """
        self._listed = {
            row.seq_id: own for row, own in zip(rows, listed, strict=True) if own is not None
        }
        kept: list[int] = []
        self._places: dict[int, int] = {}  # of the logits after the last known token
        end = 0
        for row in rows:
            start, end = end, end + row.num_draft_tokens + 1
            if row.seq_id in self._listed:
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
        listed = [self._listed[seq_id] for seq_id, ids in chosen for _ in ids]
        most, given = max(each.num_best for each in listed), padded(listed)
        logprobs = token_logprobs(self._logits[rows], tokens, most, shard, given)
        return dict(self._split(logprobs, chosen))

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
            listed = self._listed[seq_id]
            yield seq_id, logprobs[start:end].best(listed.num_best, len(listed.token_ids))


def _named_here(logits: Tensor, named: Tensor, shard: VocabShard) -> Tensor:
    """Return this rank's logits of tokens [num_rows, num_named], float64; -inf for the others'."""
    columns = (named - shard.first_token).clamp(0, logits.shape[1] - 1)
    is_held = named == columns + shard.first_token
    found = logits.gather(1, columns).double()
    found.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    return found.masked_fill_(~is_held, -torch.inf)


def _best_here(scores: Tensor, num_best: int, first_token: int) -> _Best:
    """Return this rank's best tokens, float64; -inf where it has fewer.

    They are in the `num_best` chunks with the highest maxima, equal maxima by id: for a token in
    any other chunk, each of these chunks has a better token.
    """
    chunks = pad(scores, (0, -scores.shape[1] % CHUNK_TOKENS), value=-torch.inf)
    chunks = chunks.view(len(scores), -1, CHUNK_TOKENS)
    order = chunks.amax(2).sort(dim=1, descending=True, stable=True).indices
    columns = order[:, :num_best].sort(dim=1).values  # so that tokens stay in order
    rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
    best = chunks[rows, columns].flatten(1)
    offsets = torch.arange(CHUNK_TOKENS, device=columns.device)
    token_ids = (first_token + columns.unsqueeze(2) * CHUNK_TOKENS + offsets).flatten(1)
    missing = max(0, num_best - best.shape[1])
    best = pad(best, (0, missing), value=-torch.inf)
    return _first(best.double(), pad(token_ids, (0, missing)).double(), num_best)


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
