"""Comparison of an earlier output with the tokens that the model samples at its positions.

The seed fixes the noise of each position, so a position has one token (`sampler`). Other kernels,
ranks or machines round differently. A token is possible within a tolerance if some change of the
logits, by which no difference of two logits changes by more than that, lets the token win. Its
*margin* is the least such tolerance, except where top_p truncates: there the bound of the
probability mass moves with the given tolerance, and the margin is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.device.device_sampler import DeviceRules, slabs_of, with_noise
from specdec.sampling.logits_processors import BatchLogitsProcessor, LogitsProcessor
from specdec.sampling.row_exchange import exchanged_rows
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.token_history import TokenHistory
from specdec.sampling.truncation import scaled_scores, truncation_floors
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_spec import Replay, SamplingRules

_MAX_SLACK = 0.5
"""Most that a floor moves, in scores: at temperatures near 0 the tolerance would exceed it."""


class OutputReplay:
    """Replays the output in `rules.replay` for one rank."""

    def __init__(self, rules: SamplingRules, prompt: Sequence[int], tokens: range) -> None:
        """prompt: its token ids. tokens: those of whose logits this rank has columns."""
        assert rules.replay is not None, "no output to replay"
        self._rules, self._replay = rules, rules.replay
        self._prompt = prompt
        self._tokens = tokens
        self._processor = LogitsProcessor.of(rules, tokens)

    @property
    def num_positions(self) -> int:
        """Number of tokens of the output."""
        return len(self._replay.token_ids)

    def compare(self, logits: Tensor, first: int, shard: VocabShard) -> Logprobs:
        """Return the output's token and the model's own at each position from `first` on.

        logits: [num_positions, num_tokens], the model's own; may be changed in place. The
        log-probabilities are 0 less the margin of each token; ranks are 1 where both tokens are
        equal. A collective call.
        """
        output = self._replay.token_ids[first : first + len(logits)]
        logits = self._processed(logits, first)
        positions = range(first, first + len(logits))
        batch = SamplingBatch.of_rules([self._rules] * len(logits), positions, logits.device)
        sampled = sample(logits, batch, shard).cpu().numpy()
        claimed = np.array(output, dtype=np.int64)
        margins = np.zeros(len(claimed), np.float32)
        rows = np.flatnonzero(sampled != claimed)
        if len(rows):
            part = logits[torch.from_numpy(rows).to(logits.device)]
            margins[rows] = token_margins(
                part, claimed[rows], batch[rows], shard, self._replay.tolerance
            )
        tokens = np.stack([claimed, sampled], axis=1, dtype=np.int32, casting="same_kind")
        scores = np.stack([-margins, np.zeros_like(margins)], axis=1)
        return Logprobs(tokens, scores, np.where(sampled == claimed, 1, 2).astype(np.int32))

    def _processed(self, logits: Tensor, first: int) -> Tensor:
        """Apply the rules to the logits, each row after the output before its position."""
        if self._processor.is_noop and not self._replay.grammar_masks:
            return logits
        output, history = self._replay.token_ids, None
        if self._rules.has_penalties or self._rules.bad_words:
            history = TokenHistory([*self._prompt, *output[:first]], len(self._prompt))
        batch, masks = BatchLogitsProcessor(self._tokens), _masks(self._replay)
        for row, position in enumerate(range(first, first + len(logits))):
            mask = None if masks is None else masks[position]
            batch.add(row, self._processor, position, history, mask)
            if history is not None:
                history.append(output[position])
        return batch.apply(logits)


def token_margins(
    logits: Tensor,  # [num_rows, num_tokens]
    token_ids: NDArray[np.int64],  # [num_rows]
    batch: SamplingBatch,
    shard: VocabShard,
    tolerance: float,
) -> NDArray[np.float32]:
    """Return by how much the logits must change for each token to win, [num_rows]; or infinity.

    All rows have the same temperature. A collective call.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]

    def margins_of(whole: Tensor, own: slice) -> Tensor:
        named, of_own = token_ids[own], batch[own]
        margins = [
            _margins(whole[slab], named[slab], of_own[slab], tolerance) for slab in slabs_of(whole)
        ]
        return torch.cat(margins).view(torch.int64)[:, None]  # the bits of a float64

    bits = exchanged_rows(logits, shard, margins_of, width=1)
    found: NDArray[np.float32] = bits.view(torch.float64).squeeze(1).float().cpu().numpy()
    return found


def _margins(
    logits: Tensor, token_ids: NDArray[np.int64], batch: SamplingBatch, tolerance: float
) -> Tensor:
    """Return the margins of tokens of whole rows, [num_rows] float64."""
    rules, named = batch.rules, torch.from_numpy(token_ids).to(logits.device)[:, None]
    is_sampled = batch.is_any_sampled
    temperatures = rules.temperatures if is_sampled else torch.ones_like(rules.temperatures)
    scores = scaled_scores(logits, temperatures, TensorParallelGroup())
    noisy, wide = scores, torch.full_like(temperatures, -torch.inf)
    sure = wide
    if is_sampled:
        noisy = with_noise(scores, rules.keys, 1, on_host=False)
        wide, sure = _floors(scores, rules, tolerance)
    rivals = noisy.masked_fill(scores < sure[:, None], -torch.inf).amax(1).double()
    won, score = (values.gather(1, named).squeeze(1).double() for values in (noisy, scores))
    short = torch.maximum(rivals - won, wide - score) * temperatures
    short.masked_fill_(won == -torch.inf, torch.inf)
    return short.nan_to_num(nan=torch.inf).clamp(min=0)


def _masks(replay: Replay) -> NDArray[np.int32] | None:
    """Return the masks of the grammar, int32 [num_positions, num_words]; None without one."""
    if not replay.grammar_masks:
        return None
    return np.frombuffer(replay.grammar_masks, np.int32).reshape(len(replay.token_ids), -1)


def _floors(scores: Tensor, rules: DeviceRules, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the lowest score that may be kept, and the lowest that surely is; [num_rows]."""
    limits, slack = rules.limits, min(tolerance / float(rules.temperatures[0]), _MAX_SLACK)
    floors = []
    for sign in (1, -1):
        moved = (limits.top_p * (1 + sign * slack)).clamp(max=1)
        top_p = torch.where(limits.top_p < 1, moved, limits.top_p)
        floors.append(truncation_floors(scores, replace(limits, top_p=top_p), on_host=True))
    return floors[0], floors[1] + slack
