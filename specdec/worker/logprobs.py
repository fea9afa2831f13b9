"""Log-probabilities of output and prompt tokens, for the rows that request them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling import token_logprobs
from specdec.types.messages import Logprobs, StepRow

_SLAB_LOGITS = 2**24
"""Maximum number of prompt logits in memory at once: 64 MiB of float32 over all ranks."""


@dataclass(frozen=True)
class LogprobReader:
    """Computes log-probabilities from the logits of one rank; every call is collective."""

    group: TensorParallelGroup
    first_token: int
    vocab_size: int

    def read(self, logits: Tensor, token_ids: Sequence[int], num_best: int) -> Logprobs:
        """Return log-probabilities from logits [len(token_ids), num_tokens] of this rank."""
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        num_best = min(num_best, self.vocab_size)
        return token_logprobs(logits, tokens, num_best, self.group, self.first_token)

    def read_prompt(
        self,
        hidden: Tensor,  # [len(token_ids), hidden_size]
        token_ids: Sequence[int],
        num_best: int,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Logprobs:
        """Return log-probabilities of prompt tokens, in slabs: all logits could exceed memory."""
        step = max(1, _SLAB_LOGITS // self.vocab_size)
        slabs = (slice(start, start + step) for start in range(0, len(token_ids), step))
        return Logprobs.join(
            [self.read(compute_logits(hidden[slab]), token_ids[slab], num_best) for slab in slabs]
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
        self._first: dict[int, int] = {}
        end = 0
        for row in rows:
            start, end = end, end + row.num_draft_tokens + 1
            if row.seq_id in self._num_best:
                self._first[row.seq_id] = len(kept)
                kept.extend(range(start, end))
        self._logits = logits[kept] if kept else None

    def logprobs(
        self, reader: LogprobReader, output: Sequence[tuple[int, tuple[int, ...]]]
    ) -> dict[int, Logprobs]:
        """Return log-probabilities by sequence; output: sequences with their new tokens."""
        chosen = [(seq_id, tokens) for seq_id, tokens in output if tokens and seq_id in self._first]
        if self._logits is None or not chosen:
            return {}
        rows = [self._first[seq_id] + index for seq_id, ids in chosen for index in range(len(ids))]
        tokens = [token for _, ids in chosen for token in ids]
        most = max(self._num_best[seq_id] for seq_id, _ in chosen)
        return dict(self._split(reader.read(self._logits[rows], tokens, most), chosen))

    def _split(
        self, logprobs: Logprobs, chosen: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[int, Logprobs]]:
        end = 0
        for seq_id, tokens in chosen:
            start, end = end, end + len(tokens)
            yield seq_id, logprobs[start:end].best(self._num_best[seq_id])
