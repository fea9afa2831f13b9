"""Logits processors: penalties, biases, bad words, min_tokens and token masks.

They run before temperature and truncation, and change a few logits of a row. The changes of all
rows of a batch are collected on the host as entries of the logits matrix, and applied together; a
row without such parameters costs nothing. Semantics and order are those of SamplingParams. A masked
token always ends at -inf, so its place in the order does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.sampling.token_history import TokenHistory
from specdec.types.sampling.sampling_spec import SamplingRules

_ROWS_PER_SLAB = 16
_BITS_PER_WORD = 32

Columns = NDArray[np.int64]
TokenMask = NDArray[np.int32]
"""[num_words]: bit t % 32 of word t // 32 is set if token t is allowed; tokens beyond are not."""


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """Logits processor of one sequence; tokens are columns of this rank's logits.

    allowed: mask of the tokens up to this rank's last one.
    banned, phrases: bad words of one token, and longer ones by their second to last token.
    """

    rules: SamplingRules
    tokens: range
    allowed: TokenMask | None
    biased: Columns
    biases: NDArray[np.float32]
    ends: Columns
    banned: Columns
    phrases: dict[int, list[tuple[int, ...]]]

    @classmethod
    def of(cls, rules: SamplingRules, tokens: range) -> LogitsProcessor:
        """Build the processor of a rank that holds the logits of `tokens`."""
        ids = np.array([token for token, _ in rules.logit_bias], dtype=np.int64)
        is_held = _is_held(ids, tokens)
        biases = np.array([bias for _, bias in rules.logit_bias], dtype=np.float32)
        phrases: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in rules.bad_words:
            if len(word) > 1:
                phrases[word[-2]].append(word)
        allowed, num_words = rules.allowed_token_ids, -(-tokens.stop // _BITS_PER_WORD)
        return cls(
            rules=rules,
            tokens=tokens,
            allowed=None if allowed is None else _mask_of(allowed, num_words),
            biased=ids[is_held] - tokens.start,
            biases=biases[is_held],
            ends=_columns(rules.end_token_ids, tokens),
            banned=_columns([word[0] for word in rules.bad_words if len(word) == 1], tokens),
            phrases=phrases,
        )

    @cached_property
    def changes_every_row(self) -> bool:
        """Return whether a rule other than min_tokens is set, which ends at some position."""
        rules = self.rules
        is_masked = rules.allowed_token_ids is not None or bool(rules.bad_words)
        return rules.has_penalties or bool(rules.logit_bias) or is_masked

    @cached_property
    def is_noop(self) -> bool:
        """Return whether no row is ever changed, except by a grammar."""
        return not (self.changes_every_row or self.rules.min_tokens)

    def changes(self, num_output_tokens: int) -> bool:
        """Return whether the row after `num_output_tokens` output tokens is changed."""
        return self.changes_every_row or num_output_tokens < self.rules.min_tokens

    def completed_by(self, history: TokenHistory) -> Columns:
        """Return the last tokens of the phrases whose other tokens end the output."""
        last = history.token_ids[-1]
        words = [word for word in self.phrases.get(last, ()) if history.ends_with(word[:-1])]
        return _columns([word[-1] for word in words], self.tokens)

    def allows_text(self, mask: TokenMask) -> bool:
        """Return whether a grammar's mask allows a token that is not an end token."""
        return bool((mask & ~_mask_of(self.rules.end_token_ids, len(mask))).any())


class BatchLogitsProcessor:
    """Logits processor of one batch: collects the changes of each row, then applies them.

    The changes are computed on the host, equal on all ranks except for the tokens that they hold.
    """

    def __init__(self, tokens: range) -> None:
        """Start without changes; this rank holds the logits of `tokens`."""
        self._tokens = tokens
        self._biased = _Entries()
        self._penalized = _Entries()
        self._masked = _Entries()
        self._rows: set[int] = set()
        self._token_masks: dict[int, TokenMask] = {}

    @property
    def rows(self) -> list[int]:
        """Return the rows that are changed, on this rank or another."""
        return sorted(self._rows)

    def add(
        self,
        row: int,
        processor: LogitsProcessor,
        num_output_tokens: int,
        history: TokenHistory | None,
        grammar_mask: TokenMask | None = None,
    ) -> None:
        """Collect the changes of one row.

        num_output_tokens: number of output tokens before the one that the row samples. history: the
        prompt and these tokens, if the rules depend on tokens.
        """
        rules = processor.rules
        token_mask = intersection(grammar_mask, processor.allowed)
        if token_mask is not None:
            self._token_masks[row] = token_mask
            self._rows.add(row)
        if not processor.changes(num_output_tokens):
            return
        self._rows.add(row)
        self._biased.add(row, processor.biased, processor.biases)
        if num_output_tokens < rules.min_tokens and (
            # A completed grammar has priority over min_tokens: it allows end tokens only.
            grammar_mask is None or processor.allows_text(grammar_mask)
        ):
            self._masked.add(row, processor.ends)
        if history is not None:
            self._add_by_history(row, processor, history)

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        """Apply the changes to logits [num_rows, num_tokens], in place if they are float32.

        Return all rows in float32 if any row is changed: the sampler takes one dtype, and rounding
        a changed logit to fewer bits would change the distribution.
        """
        if self._rows:
            logits = logits.float()
            self._apply_to(logits)
        return logits

    def _apply_to(self, logits: Tensor) -> None:
        rows, masks = list(self._token_masks), list(self._token_masks.values())
        apply_token_masks(logits, rows, masks, self._tokens.start)
        if self._biased:
            index, biases = self._biased.on(logits.device)
            logits[index] += biases
        if self._penalized:
            index, values = self._penalized.on(logits.device)
            logits[index] = _penalize(logits[index], *values.unbind(1))
        if self._masked:
            index, _ = self._masked.on(logits.device)
            logits[index] = -torch.inf

    def _add_by_history(self, row: int, processor: LogitsProcessor, history: TokenHistory) -> None:
        rules = processor.rules
        if rules.has_penalties:
            counts = history.counts()
            is_held = _is_held(counts.token_ids, self._tokens)
            num_times = counts.num_in_output[is_held]
            amounts = rules.frequency_penalty * num_times + rules.presence_penalty * (num_times > 0)
            factors = np.full_like(amounts, rules.repetition_penalty)
            values = np.stack([factors, amounts], axis=1, dtype=np.float32, casting="same_kind")
            self._penalized.add(row, counts.token_ids[is_held] - self._tokens.start, values)
        if rules.bad_words:
            self._masked.add(row, processor.banned)
            self._masked.add(row, processor.completed_by(history))


def apply_token_masks(
    logits: Tensor, rows: Sequence[int], masks: Sequence[TokenMask], first_token: int
) -> None:
    """Set the logits of tokens that a row's mask does not allow to -inf, in place.

    logits: [num_rows, num_tokens]; the first column is `first_token`. masks: one for each of
    `rows`.
    """
    tokens = range(first_token, first_token + logits.shape[1])
    for run in _runs(rows):
        # numpy unpacks bits about 50 times as fast as torch on a CPU.
        is_forbidden = torch.from_numpy(_forbidden(masks[run], tokens)).to(logits.device)
        first_row = rows[run.start]
        logits[first_row : first_row + len(is_forbidden)].masked_fill_(is_forbidden, -torch.inf)


@dataclass
class _Entries:
    """Sparse entries of the logits matrix, each at most once, with a value for each."""

    _rows: list[NDArray[np.int64]] = field(default_factory=list)
    _columns: list[Columns] = field(default_factory=list)
    _values: list[NDArray[np.float32]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, columns: Columns, values: NDArray[np.float32] | None = None) -> None:
        """Add entries of a row; values: one or several for each column, if any."""
        if len(columns):
            self._rows.append(np.full(len(columns), row, dtype=np.int64))
            self._columns.append(columns)
            self._values.append(np.zeros(0, dtype=np.float32) if values is None else values)

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the index (rows, columns) of the entries, and their values."""
        rows, columns, values = (
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (self._rows, self._columns, self._values)
        )
        return (rows, columns), values


def _penalize(logits: Tensor, factors: Tensor, amounts: Tensor) -> Tensor:
    """Apply the repetition penalty, then subtract the other two; all are [num_entries]."""
    return torch.where(logits > 0, logits / factors, logits * factors) - amounts


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Split `rows` into runs of consecutive rows, which are changed with one operation."""
    start = 0
    for end in range(1, len(rows) + 1):
        is_full = end - start == _ROWS_PER_SLAB
        if is_full or end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield slice(start, end)
            start = end


def _forbidden(masks: Sequence[TokenMask], tokens: range) -> NDArray[np.bool_]:
    """Return which tokens are masked, [num_masks, num_tokens]."""
    is_forbidden = np.ones((len(masks), len(tokens)), dtype=np.bool_)
    for row, mask in zip(is_forbidden, masks, strict=True):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        held = bits[tokens.start : tokens.stop]
        np.logical_not(held, out=row[: len(held)])
    return is_forbidden


def _mask_of(token_ids: Sequence[int], num_words: int) -> TokenMask:
    is_set = np.zeros(num_words * _BITS_PER_WORD, dtype=np.bool_)
    ids = np.array(token_ids, dtype=np.int64)
    is_set[ids[ids < len(is_set)]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)


def intersection(first: TokenMask | None, second: TokenMask | None) -> TokenMask | None:
    """Return the mask of the tokens that both allow; None allows all."""
    if first is None or second is None:
        return second if first is None else first
    num_words = min(len(first), len(second))
    return first[:num_words] & second[:num_words]


def _columns(token_ids: list[int] | tuple[int, ...], tokens: range) -> Columns:
    ids = np.array(token_ids, dtype=np.int64)
    return ids[_is_held(ids, tokens)] - tokens.start


def _is_held(token_ids: NDArray[np.int64], tokens: range) -> NDArray[np.bool_]:
    return (token_ids >= tokens.start) & (token_ids < tokens.stop)
