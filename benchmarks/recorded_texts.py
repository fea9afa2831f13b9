"""Texts of a target with the ranks of their tokens in a draft model's order.

The draft model scores a whole text in one pass. While a draft is right it consists of the model's
first tokens after the text, so ranks give the acceptance of any draft and, with the fan-out of a
round, whether its outcome was among those that were drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.recordings import TextScorer
from specdec.models.config.model_config import ModelConfig
from specdec.models.token_map import token_map_of
from specdec.speculation.proposers.outcome_statistics import MAX_FAN_OUT
from specdec.types.draft_messages import AheadRow

_FILLER = 0
"""Token after the end of a text."""

_LEAST_LOG_PROB = -9.0
"""Tokens that are less probable in both distributions are left out of `rank_rates`."""


@dataclass(frozen=True)
class RecordedText:
    """A prompt and its output, with the draft model's order at each place of the output.

    rank_rates: probability of each rank of the target's token, over the noise of sampling; the last
        column is that of all others. At temperature 0 one of them is 1.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ranked: NDArray[np.int64]  # [num_output_tokens, MAX_FAN_OUT + 1], the likeliest first
    rank_rates: NDArray[np.float64]  # [num_output_tokens, MAX_FAN_OUT + 2]

    @property
    def length(self) -> int:
        """Tokens of the whole text."""
        return len(self.prompt) + len(self.output)

    def token(self, position: int) -> int:
        """Return the target's token."""
        if position < len(self.prompt):
            return self.prompt[position]
        index = position - len(self.prompt)
        return self.output[index] if index < len(self.output) else _FILLER

    def candidates(self, position: int, count: int) -> list[int]:
        """Return the draft model's first tokens at a place of the output, up to MAX_FAN_OUT + 1."""
        index = position - len(self.prompt)
        if not 0 <= index < len(self.output):
            return [_FILLER]
        found: list[int] = self.ranked[index, :count].tolist()
        return found

    def expected_hits(self, row: AheadRow) -> float | None:
        """Return the expected hits of a round; None where the text ends before its outcome.

        It is the sum, over the places that the round has reached, of the probability that the
        target's token there is the outcome, and among those of the fan-out. The difference to
        actual hits has mean 0, whatever the rounds depend on before their own noise.
        """
        base, total = row.num_known_tokens, 0.0
        for num_accepted, width in enumerate(row.fan_out):
            index = base + num_accepted - len(self.prompt)
            if not 0 <= index < len(self.output):
                return None
            rates = self.rank_rates[index]
            first = 1 if num_accepted < row.num_drafts else 0  # rank 0 would be accepted
            total += float(rates[first : first + width].sum())
            if row.drafts[num_accepted : num_accepted + 1] != (self.output[index],):
                return total
        return total


class RecordedTexts:
    """As `benchmarks.simulated_models.Texts`, of recorded texts, by sequence."""

    def __init__(self, texts: Mapping[int, RecordedText]) -> None:
        self._texts = texts

    def token(self, seq_id: int, position: int) -> int:
        """Return the token at a position."""
        return self._texts[seq_id].token(position)

    def drafted(self, seq_id: int, position: int, count: int) -> tuple[int, ...]:
        """Return the draft model's first tokens at consecutive positions."""
        text = self._texts[seq_id]
        return tuple(text.candidates(position + index, 1)[0] for index in range(count))

    def candidates(self, seq_id: int, position: int, count: int) -> list[int]:
        """Return the draft model's first tokens at a position, the likeliest first."""
        return self._texts[seq_id].candidates(position, count)


class TextRecorder:
    """Records texts by the logits of a draft model, and of the target above temperature 0."""

    def __init__(self, target: TextScorer, draft: TextScorer, draft_dir: Path) -> None:
        """draft_dir: of the draft model, which may have a map of tokens that it drafts."""
        self._target = target
        self._draft = draft
        size = ModelConfig.from_directory(draft_dir).vocab_size
        self._tokens = token_map_of(draft_dir, None, size)

    def record(
        self, prompt: tuple[int, ...], output: tuple[int, ...], temperature: float
    ) -> RecordedText:
        """Return a text with the draft model's order; ranks are those without noise."""
        draft = self._draft.logits(prompt, output).float()
        if self._tokens is not None:
            known = torch.full_like(draft, -torch.inf)
            known[:, list(self._tokens)] = draft[:, list(self._tokens)]
            draft = known
        ranked = draft.topk(MAX_FAN_OUT + 1).indices.numpy()
        if temperature == 0:
            rates = _rates_of(ranked == np.array(output)[:, None])
        else:
            target = self._target.logits(prompt, output).float()
            rates = rank_rates(target / temperature, draft / temperature)
        return RecordedText(prompt, output, ranked, rates)


def _rates_of(is_rank: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the rates of RecordedText for ranks that are known."""
    others = ~is_rank.any(1, keepdims=True)
    return np.concatenate([is_rank, others], 1).astype(np.float64)


def rank_rates(
    target: Tensor,  # [num_places, vocab_size]
    draft: Tensor,  # [num_places, vocab_size]
    *,
    num_samples: int = 128,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return the probability of each rank of argmax(log p + g) in the order of log q + g.

    g is Gumbel noise, shared by both; p and q are the softmax of the logits. Sampled: the standard
    error of a rate is at most 0.5 / sqrt(num_samples), and that of a mean over places much smaller.
    """
    generator = torch.Generator().manual_seed(seed)
    rates = []
    for p, q in zip(target.log_softmax(-1), draft.log_softmax(-1), strict=True):
        kept = torch.maximum(p, q) > _LEAST_LOG_PROB
        p, q = p[kept], q[kept]
        uniform = torch.rand((num_samples, len(p)), generator=generator, dtype=torch.float64)
        noise = -(-uniform.clamp_min(1e-300).log()).log()
        token = (p + noise).argmax(-1, keepdim=True)
        scores = q + noise
        ranks = (scores > scores.gather(-1, token)).sum(-1).clamp_max(MAX_FAN_OUT + 1)
        rates.append(torch.bincount(ranks, minlength=MAX_FAN_OUT + 2).double() / num_samples)
    return torch.stack(rates).numpy()


def expected_hit_rate(rounds: Sequence[tuple[RecordedText, AheadRow]]) -> float:
    """Return the expected hits of rounds, in their texts, over their number."""
    hits = [each for text, row in rounds if (each := text.expected_hits(row)) is not None]
    return sum(hits) / len(hits) if hits else 0.0
