"""Log-probabilities of output and prompt, for the rows whose rules ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling import token_logprobs
from specdec.types.messages import Logprobs, StepRow

_SLAB_LOGITS = 2**24
"""So many logits of a prompt are in memory at a time: 64 MiB of float32 over all ranks."""


@dataclass(frozen=True)
class LogprobReader:
    """Reads log-probabilities off the logits of one rank; every call is collective."""

    group: TensorParallelGroup
    first_token: int
    vocab_size: int

    def read(self, logits: Tensor, token_ids: Sequence[int], num_best: int) -> Logprobs:
        """logits: [len(token_ids), num_tokens], of this rank's tokens."""
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
        """Of a part of a prompt, a slab at a time: its logits may be larger than the model."""
        step = max(1, _SLAB_LOGITS // self.vocab_size)
        slabs = (slice(start, start + step) for start in range(0, len(token_ids), step))
        return Logprobs.join(
            [self.read(compute_logits(hidden[slab]), token_ids[slab], num_best) for slab in slabs]
        )


class KeptLogits:
    """Logits as the model computed them, of the rows that ask, until it is known what came."""

    def __init__(
        self, logits: Tensor, rows: Sequence[StepRow], num_best: Sequence[int | None]
    ) -> None:
        """Copies what is needed of `logits`, which are one more each than the rows have drafts.

        num_best: how many of the best tokens each row asks for; None: not even its own.
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
        self, reader: LogprobReader, came: Sequence[tuple[int, tuple[int, ...]]]
    ) -> dict[int, Logprobs]:
        """By sequence, of the tokens that came; came: sequences with their new tokens."""
        asked = [(seq_id, tokens) for seq_id, tokens in came if tokens and seq_id in self._first]
        if self._logits is None or not asked:
            return {}
        places = [self._first[seq_id] + place for seq_id, ids in asked for place in range(len(ids))]
        tokens = [token for _, ids in asked for token in ids]
        most = max(self._num_best[seq_id] for seq_id, _ in asked)
        return dict(self._divided(reader.read(self._logits[places], tokens, most), asked))

    def _divided(
        self, logprobs: Logprobs, asked: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[int, Logprobs]]:
        end = 0
        for seq_id, tokens in asked:
            start, end = end, end + len(tokens)
            yield seq_id, logprobs[start:end].best(self._num_best[seq_id])
