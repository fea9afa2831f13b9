"""The loss of a batch and its gradients, and the drafts of a batch, a chunk of bases at a time.

Logits of a batch would be the largest tensors by far, [depth, R, V]. So the output head, the loss
and their gradients are computed for some bases at a time, and the gradients of the drafter's states
are then propagated at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training.acceptance import noise_given_choice
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter
from specdec.training.losses import (
    LOSSES,
    Teacher,
    confidence_loss,
    d_pace_weights,
    decayed_weights,
)
from specdec.training.sampled_softmax import DrawnTokens

_CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Logits of the drafter in a chunk, by device: 16 MiB in float32 fit into a CPU's caches, 512 MiB
fill a GPU."""
_LEAST_P = 1e-37  # a float32 whose logarithm is finite


class Objective:
    """Loss of a drafter against the target's distribution over the drafter's tokens."""

    def __init__(
        self,
        config: TrainingConfig,
        target: Target,
        token_ids: Tensor,
        columns: Sequence[int] | None = None,
    ) -> None:
        """token_ids: of the drafter, [V] int64.

        columns: of the noise, a permutation of 0 to V - 1, by default in order. Drafters with as
        many tokens are compared under the same noise where common tokens have common columns.
        """
        self._config = config
        self._loss = LOSSES[config.loss]
        self._teacher_head = target.output_rows(token_ids)
        device = target.device
        draft_ids = torch.full((target.config.vocab_size,), -1)
        draft_ids[token_ids] = torch.arange(len(token_ids))
        self._token_ids, self._draft_ids = token_ids.to(device), draft_ids.to(device)
        self._columns = None if columns is None else torch.tensor(columns, device=device)
        self._weights = decayed_weights(config.depth, config.decay).to(device)
        self._chunk_logits = _CHUNK_LOGITS[device.type]

    def backward(
        self,
        drafter: Drafter,
        batch: Batch,
        hidden: HiddenStates,
        tokens: DrawnTokens | None = None,
    ) -> Tensor:
        """Add the gradients of the mean loss of a base to the drafter's.

        tokens: in the loss, those of the batch among them; None for all, which losses other than
        `SAMPLED_LOSSES` need. Returns that loss, [] float64 on the target's device, for which no
        caller has to wait.
        """
        depth = drafter.trained_depth or self._config.depth
        is_trained = self._is_trained(batch, depth)
        total = torch.zeros((), dtype=torch.float64, device=batch.device)
        with self._autocast():
            states = drafter.states(batch, hidden)[:depth]
            gradient = torch.zeros_like(states)
            for bases, teacher in self._chunks(batch, hidden, depth, tokens):
                own = states[:, bases].detach().requires_grad_()
                loss = self._losses(drafter, own, teacher, is_trained[:, bases], tokens)
                mean = loss.sum() / batch.num_bases
                mean.backward()
                assert own.grad is not None
                gradient[:, bases] = own.grad
                total += mean.detach()
        states.backward(gradient)
        return total

    def _losses(
        self,
        drafter: Drafter,
        states: Tensor,
        teacher: Teacher,
        is_trained: Tensor,
        tokens: DrawnTokens | None,
    ) -> Tensor:
        """Return the weighted loss of each draft token of a chunk, [depth, c]."""
        if tokens is None:
            log_q = drafter.logits(states).float().log_softmax(-1)
        else:
            logits = drafter.logits(states, tokens.columns).float()
            log_q = (logits + tokens.offsets).log_softmax(-1)
        losses = self._loss(log_q, teacher)
        log_odds = drafter.confidence(states)
        if log_odds is not None:
            losses = losses + confidence_loss(log_odds, log_q, teacher)
        weights = self._weights[: len(is_trained)]
        if self._config.position_weights == "d_pace":
            weights = d_pace_weights(log_q.detach(), teacher, is_trained)
        return losses * weights * is_trained

    @torch.no_grad()
    def drafts(
        self, drafter: Drafter, batch: Batch, hidden: HiddenStates, generator: torch.Generator
    ) -> Tensor:
        """Return the drafts after all bases as the target's tokens, [depth, R] int64.

        They are those of `acceptance`; generator: of the noise at temperatures above 0, on the
        device of the batch.
        """
        found = []
        with self._autocast():
            states = drafter.states(batch, hidden)
            for bases, teacher in self._chunks(batch, hidden, self._config.depth):
                logits = drafter.logits(states[:, bases]).float()
                noise = self._noise(batch, bases, teacher.p, generator)
                found.append((logits + drafter.draft_temperature * noise).argmax(-1))
        return self._token_ids[torch.cat(found, dim=1)]

    def _noise(self, batch: Batch, bases: slice, p: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise times temperature for the draft tokens of a chunk, [depth, c, V]."""
        if not batch.host.temperatures[bases].numpy().any():
            return torch.zeros((), device=batch.device)
        scale = batch.temperatures[bases][:, None]
        parts = []
        for index, each in enumerate(p):
            log_p = (each.clamp(min=_LEAST_P).log() / scale.clamp(min=1e-3)).log_softmax(-1)
            chosen = self._draft_ids[batch.next_ids[batch.after(index)[bases]]].clamp(min=0)
            uniform = torch.rand(log_p.shape, generator=generator, device=batch.device)
            if self._columns is not None:
                uniform = uniform[:, self._columns]
            parts.append(scale * noise_given_choice(log_p, chosen, uniform))
        return torch.stack(parts)

    def _chunks(
        self, batch: Batch, hidden: HiddenStates, depth: int, tokens: DrawnTokens | None = None
    ) -> Iterator[tuple[slice, Teacher]]:
        """Yield c bases, and the target's distribution of each draft token, [depth, c].

        It is the softmax over the draft tokens alone, or some of them, by the served output head:
        what the drafter can come close to.
        """
        num_logits = len(self._token_ids if tokens is None else tokens.columns)
        size = max(1, self._chunk_logits // (depth * num_logits))
        for start in range(0, batch.num_bases, size):
            bases = slice(start, min(start + size, batch.num_bases))
            distinct, rows = batch.distinct_places(bases, depth)
            with self._autocast(is_enabled=False):
                logits = self._teacher_head.logits(hidden.final[distinct])
            if tokens is not None:
                logits = logits[:, tokens.columns] + tokens.offsets
            teacher = Teacher.of_logits(logits)
            yield bases, Teacher(teacher.p[rows], teacher.negative_entropy[rows])

    def _is_trained(self, batch: Batch, depth: int) -> Tensor:
        """Return the draft tokens that count, [depth, R] bool.

        Those that exist and stand for a token that the drafter has, as do all drafts before them.
        """
        exists = batch.exists(depth)
        is_drafted = self._draft_ids[batch.next_ids[batch.places(depth)]] >= 0
        return (is_drafted.cumprod(0) > 0) & exists

    def _autocast(self, *, is_enabled: bool = True) -> AbstractContextManager[None]:
        """Run products in the configured precision; if not enabled, in float32."""
        is_enabled = is_enabled and self._config.precision == "bfloat16"
        device = self._token_ids.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=is_enabled)
