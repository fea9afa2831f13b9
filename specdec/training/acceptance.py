"""Acceptance length of drafts on held-out samples, as it would be served.

The samples are the target's own text, so a draft token is right where it is the token of the text.
While all drafts of a base are right, the drafter's inputs are those of `Drafter.states`, so these
are the drafts that would be served. A step begins at a base and ends at its first wrong draft; the
next one begins at the token after those accepted.

At a temperature above 0 target and drafter share Gumbel noise (coupling). The noise of the text is
not stored, so it is drawn given that the text came of it (Maddison et al. 2014, A* sampling: the
maximum first, then the others below it).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.training.data.batches import Batch
from specdec.types.reports.additive import Additive

_TINY = 1e-30


@dataclass(frozen=True)
class Acceptance(Additive):
    """Counts of drafts and steps.

    num_steps: of the target. num_accepted: draft tokens in these steps.
    num_right: for each place in a draft, bases up to whose draft token all are right, of
    num_bases, those with that many tokens after them.
    """

    num_steps: int
    num_accepted: int
    num_right: tuple[int, ...]
    num_bases: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens in a step of the target: the accepted drafts and its own."""
        return 1 + self.num_accepted / max(1, self.num_steps)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Probability that all drafts up to each place are right."""
        pairs = zip(self.num_right, self.num_bases, strict=True)
        return tuple(right / max(1, count) for right, count in pairs)

    @classmethod
    def by_sample(cls, batch: Batch, drafts: Tensor) -> list[Acceptance]:
        """Compare the draft tokens of all bases, [depth, R], with the text of each sample.

        Waits for the device of the drafts.
        """
        batch, drafts, depth = batch.host, drafts.cpu(), len(drafts)
        exists = batch.exists(depth)
        text = batch.next_ids[batch.places(depth)]
        is_right = ((drafts == text) & exists).cumprod(0)
        lengths = is_right.sum(0).tolist()
        found = []
        for span in batch.spans:
            steps = _steps(lengths[span.bases])
            of_places = (each[:, span.bases].sum(1).tolist() for each in (is_right, exists))
            found.append(cls(len(steps), sum(steps), *map(tuple, of_places)))
        return found


def is_longer(before: Sequence[Acceptance], after: Sequence[Acceptance]) -> bool:
    """Return whether drafts save steps of the target beyond chance, on the same samples.

    The mean of the steps that each of at least three samples saves must exceed the one-sided
    97.7 % quantile of Student's t (two for many samples), by its Cornish-Fisher expansion. Steps
    are whole, so their deviation counts as at least one. before, after: by sample, in the same
    order.
    """
    saved = [old.num_steps - new.num_steps for old, new in zip(before, after, strict=True)]
    if len(saved) < 3:
        return False
    freedom = len(saved) - 1
    quantile = 2 + 2.5 / freedom + 3.06 / freedom**2
    standard_error: float = max(1.0, statistics.stdev(saved)) / len(saved) ** 0.5
    return sum(saved) / len(saved) > quantile * standard_error


def _steps(lengths: Sequence[int]) -> list[int]:
    """Return the accepted drafts of each step; lengths: of right drafts after each base."""
    steps, base = [], 0
    while base < len(lengths):
        steps.append(lengths[base])
        base += lengths[base] + 1
    return steps


def noise_given_choice(log_p: Tensor, chosen: Tensor, uniform: Tensor) -> Tensor:
    """Return Gumbel noise [N, V] with which `chosen` is the argmax of log p plus noise.

    log_p: [N, V], normalized. chosen: [N] int64. uniform: [N, V], independent draws from 0 to 1;
    with these the noise has the distribution of the noise that sampled the text.
    """
    uniform = uniform.clamp(_TINY, 1 - 1e-7)
    free = log_p - torch.log(-torch.log(uniform))  # independent, before the condition
    largest = free.gather(1, chosen[:, None]) - log_p.gather(1, chosen[:, None])  # a Gumbel(0)
    # A Gumbel variable x with location m, given x < z, is -log(exp(-z) + exp(-x)).
    below = -torch.logaddexp(-largest.expand_as(free), -free)
    return below.scatter(1, chosen[:, None], largest) - log_p
