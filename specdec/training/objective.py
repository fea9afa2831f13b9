"""The loss of a batch and its gradients, and the drafts of a batch, a chunk of bases at a time.

Logits of a batch would be the largest tensors by far, [depth, R, V]. So the output head, the loss
and their gradients are computed for some bases at a time, and the gradients of the drafter's states
are then propagated at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.forward_batch import HiddenStates
from specdec.training.acceptance import noise_given_choice
from specdec.training.batches import Batch
from specdec.training.config import TrainingConfig
from specdec.training.drafters.base import Drafter
from specdec.training.losses import LOSSES, Teacher, d_pace_weights, decayed_weights
from specdec.training.target import Target

_CHUNK_LOGITS = 2**22
"""Logits of a chunk: 16 MiB in float32."""
_LEAST_P = 1e-37  # a float32 whose logarithm is finite


class Objective:
    """Loss of a drafter against the target's distribution over the drafter's tokens."""

    def __init__(self, config: TrainingConfig, target: Target, token_ids: Tensor) -> None:
        """token_ids: of the drafter, [V] int64."""
        self._config = config
        self._loss = LOSSES[config.loss]
        self._teacher_head = target.output_rows(token_ids)
        self._token_ids = token_ids
        self._draft_ids = torch.full((target.config.vocab_size,), -1)
        self._draft_ids[token_ids] = torch.arange(len(token_ids))
        self._weights = decayed_weights(config.depth, config.decay)

    def backward(self, drafter: Drafter, batch: Batch, hidden: HiddenStates) -> float:
        """Add the gradients of the mean loss of a base to the drafter's; return that loss."""
        is_trained = self._is_trained(batch)
        total = 0.0
        with self._autocast():
            states = drafter.states(batch, hidden)
            gradient = torch.zeros_like(states)
            for bases, teacher in self._chunks(batch, hidden):
                own = states[:, bases].detach().requires_grad_()
                log_q = drafter.logits(own).float().log_softmax(-1)
                weights = self._weights
                if self._config.position_weights == "d_pace":
                    weights = d_pace_weights(log_q.detach(), teacher, is_trained[:, bases])
                loss = self._loss(log_q, teacher) * weights * is_trained[:, bases]
                mean = loss.sum() / batch.num_bases
                mean.backward()
                assert own.grad is not None
                gradient[:, bases] = own.grad
                total += mean.item()
        states.backward(gradient)
        return total

    @torch.no_grad()
    def drafts(
        self, drafter: Drafter, batch: Batch, hidden: HiddenStates, generator: torch.Generator
    ) -> Tensor:
        """Return the drafts behind all bases as the target's tokens, [depth, R] int64.

        They are those of `acceptance`; generator: of the noise at temperatures above 0.
        """
        found = []
        with self._autocast():
            states = drafter.states(batch, hidden)
            for bases, teacher in self._chunks(batch, hidden):
                logits = drafter.logits(states[:, bases]).float()
                noise = self._noise(batch, bases, teacher.p, generator)
                found.append((logits + noise).argmax(-1))
        return self._token_ids[torch.cat(found, dim=1)]

    def _noise(self, batch: Batch, bases: slice, p: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise times temperature for the draft tokens of a chunk, [depth, c, V]."""
        temperatures = batch.temperatures[bases]
        if not temperatures.any():
            return torch.zeros(())
        scale = temperatures[:, None]
        parts = []
        for index, each in enumerate(p):
            log_p = (each.clamp(min=_LEAST_P).log() / scale.clamp(min=1e-3)).log_softmax(-1)
            chosen = self._draft_ids[batch.next_ids[batch.behind(index)[bases]]].clamp(min=0)
            parts.append(scale * noise_given_choice(log_p, chosen, generator))
        return torch.stack(parts)

    def _chunks(self, batch: Batch, hidden: HiddenStates) -> Iterator[tuple[slice, Teacher]]:
        """Yield c bases, and the target's distribution of each draft token, [depth, c].

        It is the softmax over the draft tokens alone, by the served output head: what the drafter
        can come close to.
        """
        depth = self._config.depth
        final = F.pad(hidden.final[batch.bases], (0, 0, 0, depth))  # [R + depth, hidden_size]
        size = max(1, _CHUNK_LOGITS // (depth * len(self._token_ids)))
        for start in range(0, batch.num_bases, size):
            bases = slice(start, min(start + size, batch.num_bases))
            with self._autocast(is_enabled=False):
                logits = self._teacher_head.logits(final[start : bases.stop + depth - 1])
            teacher = Teacher.of_logits(logits)
            # Views: draft token i of a base is draft token 0 of the base i behind it.
            p = teacher.p.unfold(0, depth, 1).permute(2, 0, 1)
            yield bases, Teacher(p, teacher.negative_entropy.unfold(0, depth, 1).T)

    def _is_trained(self, batch: Batch) -> Tensor:
        """Return the draft tokens that count, [depth, R] bool.

        Those that exist and stand for a token that the drafter has, as do all drafts before them.
        """
        exists = batch.exists(self._config.depth)
        places = [batch.behind(index) for index in range(self._config.depth)]
        is_drafted = self._draft_ids[batch.next_ids[torch.stack(places)]] >= 0
        return (is_drafted.cumprod(0) > 0) & exists

    def _autocast(self, *, is_enabled: bool = True) -> AbstractContextManager[None]:
        """Run products in the configured precision; if not enabled, in float32."""
        is_enabled = is_enabled and self._config.precision == "bfloat16"
        device = self._token_ids.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=is_enabled)
