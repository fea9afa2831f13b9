"""Sampling of whole rows of logits in tensors of fixed shape: the definition.

The token of a row is the argmax of (logits / temperature, truncated by min_p, top_k and top_p) +
Gumbel noise, which is a sample of the softmax of the truncated logits (Gumbel 1954; see Maddison,
Tarlow and Minka 2014, arXiv 1411.0030). At temperature 0 it is the argmax of the logits. Of equal
scores the lowest token id wins. No value is read by the host, unless the rows are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.reference.sample_rows import RowArgmax, RowSampling
from specdec.kernels.sample import torch_row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.gumbel import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NOISE_ROUNDING,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from specdec.sampling.truncation import DeviceLimits, scaled_scores, truncation_floors
from specdec.types.sampling.sampling_spec import SamplingRules

SLAB_LOGITS = 2**23
"""Logits that torch's operators sample at once, which take about 50 bytes each."""


class SamplingKind(IntEnum):
    """The work that the rows of a step need at most; a row may need less."""

    GREEDY = 0
    SAMPLED = 1
    TRUNCATED = 2


def kind_of(rules: SamplingRules) -> SamplingKind:
    """Return the work that the rows of a sequence need."""
    if rules.temperature == 0:
        return SamplingKind.GREEDY
    is_truncated = rules.top_k > 0 or rules.top_p < 1 or rules.min_p > 0
    return SamplingKind.TRUNCATED if is_truncated else SamplingKind.SAMPLED


@dataclass(frozen=True)
class DeviceRules:
    """Sampling parameters of rows of logits, on the device.

    truncates: whether a row may have min_p, top_k or top_p.
    """

    temperatures: Tensor  # [num_rows] float32; 0: greedy
    limits: DeviceLimits
    keys: NoiseKeys
    truncates: bool

    def __getitem__(self, rows: slice) -> DeviceRules:
        temperatures, limits = self.temperatures[rows], self.limits[rows]
        return DeviceRules(temperatures, limits, self.keys[rows], self.truncates)

    @property
    def columns(self) -> RowSampling:
        """Return the rules as columns for kernels."""
        limits, keys = self.limits, self.keys
        columns = (
            *(self.temperatures, limits.top_k, limits.top_p, limits.min_scores),
            *(keys.seeds, keys.choices, keys.positions),
        )
        return RowSampling(*(column.contiguous() for column in columns))


@dataclass(frozen=True)
class DeviceSample:
    """Tokens of rows of logits.

    is_invalid: whether no token can be sampled, for NaN or +inf, or for -inf alone.
    """

    token_ids: Tensor  # [num_rows] int64
    is_invalid: Tensor  # [num_rows] bool


def slabs_of(logits: Tensor) -> list[slice]:
    """Divide rows into those that torch's operators sample at once."""
    size = max(1, SLAB_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, max(1, len(logits)), size)]


def sample_rows(
    logits: Tensor, rules: DeviceRules | None, *, on_host: bool = False
) -> DeviceSample:
    """Sample each row, without a value that the host has to read.

    logits: [num_rows, vocab_size], of any float type; NaN counts as -inf. rules: None for the
    argmax of all rows, which one of temperature 0 takes in any case. on_host: whether values may
    be read, to save work.
    """
    if rules is None:
        return sample_of(torch_row_argmax(logits))
    parts = [_sampled(logits[own], rules[own], on_host=on_host) for own in slabs_of(logits)]
    return DeviceSample(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def sample_of(best: RowArgmax) -> DeviceSample:
    """Return the best token of each row."""
    return DeviceSample(best.token_ids, best.has_nan | (best.values == -torch.inf))


def _sampled(logits: Tensor, rules: DeviceRules, *, on_host: bool) -> tuple[Tensor, Tensor]:
    """Return the columns of a DeviceSample."""
    best = sample_of(torch_row_argmax(logits))
    perturbed = perturbed_scores(logits, rules, 1, on_host=on_host)
    is_noisy = rules.temperatures > 0
    return torch.where(is_noisy, perturbed.argmax(1), best.token_ids), best.is_invalid


def perturbed_scores(logits: Tensor, rules: DeviceRules, count: int, *, on_host: bool) -> Tensor:
    """Return the scores with noise of rows of the whole vocabulary, [num_rows, vocab_size] float32.

    Those of tokens that are cut are -inf; a row of temperature 0 has those of temperature 1.
    on_host: whether scores that cannot be among the `count` largest of their row may be -inf.
    """
    temperatures = rules.temperatures.masked_fill(rules.temperatures == 0, 1)
    scores = scaled_scores(logits, temperatures, TensorParallelGroup())
    if rules.truncates:
        floors = truncation_floors(scores, rules.limits, on_host=on_host)
        scores.masked_fill_(scores < floors.unsqueeze(1), -torch.inf)
    return with_noise(scores, rules.keys, count, on_host=on_host)


def with_noise(scores: Tensor, keys: NoiseKeys, count: int, *, on_host: bool) -> Tensor:
    """Return scores of the whole vocabulary with the noise of their tokens, of the same shape.

    scores: [num_rows, vocab_size] float32. count, on_host: as in `perturbed_scores`.
    """
    num_rows, vocab_size = scores.shape
    if missing := -vocab_size % CHUNK_TOKENS:
        scores = pad(scores, (0, missing), value=-torch.inf)
    chunks = scores.view(num_rows, scores.shape[1] // CHUNK_TOKENS, CHUNK_TOKENS)
    if on_host:
        rows, columns = _chunks_of_best(chunks, keys, count)
        perturbed = torch.full_like(chunks, -torch.inf)
        perturbed[rows, columns] = chunks[rows, columns] + gumbel_noise(keys[rows], columns)
    else:
        perturbed = chunks + _noise(keys, chunks)
    return perturbed.flatten(1)[:, :vocab_size]


def _chunks_of_best(chunks: Tensor, keys: NoiseKeys, count: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the chunks that can hold one of a row's `count` best tokens.

    The best tokens of chunks, with the least noise, or the tokens with the largest noise of their
    chunk: `count` of either kind are at least as good as the last one of the best.
    """
    maxima = chunks.amax(2)
    limits = _least_of_best(maxima, count) + (MIN_NOISE - MAX_NOISE - NOISE_ROUNDING)
    rows, columns = ((maxima >= limits) & (maxima > -torch.inf)).nonzero().unbind(1)
    largest = largest_noise(keys[rows], columns)
    reached = torch.full_like(maxima, -torch.inf)
    reached[rows, columns] = chunks[rows, columns, largest.offsets] + largest.noise
    least = _least_of_best(reached, count)[rows, 0] - NOISE_ROUNDING
    chosen = (maxima[rows, columns] + largest.noise >= least).nonzero().squeeze(1)
    return rows[chosen], columns[chosen]


def _least_of_best(values: Tensor, count: int) -> Tensor:
    """Return the `count`-th largest value of each row, [num_rows, 1]; -inf where it has fewer."""
    if values.shape[1] < count:
        return values.new_full((len(values), 1), -torch.inf)
    return values.topk(count).values[:, -1:]


def _noise(keys: NoiseKeys, chunks: Tensor) -> Tensor:
    """Return the noise of all tokens, [num_rows, num_columns, CHUNK_TOKENS] float32."""
    num_rows, num_columns, _ = chunks.shape
    ids = torch.arange(num_columns, device=chunks.device)
    columns = (
        values.unsqueeze(1).expand(num_rows, num_columns).flatten()
        for values in (keys.seeds, keys.choices, keys.positions)
    )
    found = gumbel_noise(NoiseKeys(*columns), ids.expand(num_rows, num_columns).flatten())
    return found.view_as(chunks)
