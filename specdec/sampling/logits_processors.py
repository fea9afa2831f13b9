"""What a request's parameters do to logits before they are scaled, cut and drawn from.

Penalties, biases and forbidden tokens change a few logits of a row each. They are collected on the
host as single entries of the matrix of logits, for all rows of a batch, and made together; a row
that asks for nothing costs nothing. Meanings and order are those of SamplingParams. A token that is
forbidden ends at -inf, whatever else changes it, so that part of the order makes no difference.
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
from specdec.types.sampling_spec import SamplingRules

_ROWS_PER_SLAB = 16
_BITS_PER_WORD = 32

Columns = NDArray[np.int64]
TokenMask = NDArray[np.int32]
"""[num_words]: bit t % 32 of word t // 32 is set where token t may come; those beyond may not."""


@dataclass(frozen=True, eq=False)
class Shaping:
    """The rules of one sequence that change logits, as columns of this rank's part of them.

    allowed: of the tokens up to this rank's last one.
    phrases: bad words of several tokens, by the token before the last.
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
    def of(cls, rules: SamplingRules, tokens: range) -> Shaping:
        """tokens: whose logits this rank has."""
        ids = np.array([token for token, _ in rules.logit_bias], dtype=np.int64)
        is_held = _is_held(ids, tokens)
        biases = np.array([bias for _, bias in rules.logit_bias], dtype=np.float32)
        phrases: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in rules.bad_words:
            if len(word) > 1:
                phrases[word[-2]].append(word)
        allowed = rules.allowed_token_ids
        return cls(
            rules=rules,
            tokens=tokens,
            allowed=None if allowed is None else _mask_of(allowed, _num_words(tokens.stop)),
            biased=ids[is_held] - tokens.start,
            biases=biases[is_held],
            ends=_columns(rules.end_token_ids, tokens),
            banned=_columns([word[0] for word in rules.bad_words if len(word) == 1], tokens),
            phrases=phrases,
        )

    @cached_property
    def changes_every_row(self) -> bool:
        """Whether there is more than min_tokens, which ends."""
        rules = self.rules
        is_masked = rules.allowed_token_ids is not None or bool(rules.bad_words)
        return rules.has_penalties or bool(rules.logit_bias) or is_masked

    @cached_property
    def is_idle(self) -> bool:
        """Whether no row is ever changed, but by a grammar."""
        return not (self.changes_every_row or self.rules.min_tokens)

    def changes(self, num_output_tokens: int) -> bool:
        """Whether the row after so many output tokens is changed at all."""
        return self.changes_every_row or num_output_tokens < self.rules.min_tokens

    def closed_by(self, history: TokenHistory) -> Columns:
        """The last tokens of the phrases whose other tokens have just been output."""
        last = history.token_ids[-1]
        words = [word for word in self.phrases.get(last, ()) if history.ends_with(word[:-1])]
        return _columns([word[-1] for word in words], self.tokens)

    def leaves_some(self, mask: TokenMask) -> bool:
        """Whether a grammar's mask allows any token that does not end the text."""
        return bool((mask & ~_mask_of(self.rules.end_token_ids, len(mask))).any())


class LogitEdits:
    """What is to be done to the logits of one batch, [num_rows, num_tokens]: collect, then apply.

    All of it is known on the host, and the same on every rank but for which tokens it holds.
    """

    def __init__(self, tokens: range) -> None:
        """tokens: whose logits this rank has."""
        self._tokens = tokens
        self._biased = _Entries()
        self._penalised = _Entries()
        self._masked = _Entries()
        self._rows: set[int] = set()
        self._token_masks: dict[int, TokenMask] = {}

    @property
    def rows(self) -> list[int]:
        """Those that are changed, on this rank or another."""
        return sorted(self._rows)

    def add(
        self,
        row: int,
        shaping: Shaping,
        num_output_tokens: int,
        history: TokenHistory | None,
        grammar_mask: TokenMask | None = None,
    ) -> None:
        """Takes in what the rules say of one row.

        num_output_tokens: how many there are before the token that the row is about. history: those
        tokens and the prompt, where the rules need tokens.
        """
        rules = shaping.rules
        token_mask = _intersection(grammar_mask, shaping.allowed)
        if token_mask is not None:
            self._token_masks[row] = token_mask
            self._rows.add(row)
        if not shaping.changes(num_output_tokens):
            return
        self._rows.add(row)
        self._biased.add(row, shaping.biased, shaping.biases)
        if num_output_tokens < rules.min_tokens and (
            # A grammar that is at its end goes before min_tokens: nothing else could come.
            grammar_mask is None or shaping.leaves_some(grammar_mask)
        ):
            self._masked.add(row, shaping.ends)
        if history is not None:
            self._add_by_history(row, shaping, history)

    def apply(self, logits: Tensor) -> Tensor:
        """logits: [num_rows, num_tokens], changed in place where they are float32.

        Returns them with the edits made, in float32 if there are any: all rows, as what samples
        takes them in one type, and rounding an edit to fewer bits would change the distribution.
        """
        if self._rows:
            logits = logits.float()
            self._edit(logits)
        return logits

    def _edit(self, logits: Tensor) -> None:
        rows, masks = list(self._token_masks), list(self._token_masks.values())
        apply_token_masks(logits, rows, masks, self._tokens.start)
        if self._biased:
            places, biases = self._biased.on(logits.device)
            logits[places] += biases
        if self._penalised:
            places, values = self._penalised.on(logits.device)
            logits[places] = _penalise(logits[places], *values.unbind(1))
        if self._masked:
            places, _ = self._masked.on(logits.device)
            logits[places] = -torch.inf

    def _add_by_history(self, row: int, shaping: Shaping, history: TokenHistory) -> None:
        rules = shaping.rules
        if rules.has_penalties:
            counts = history.counts()
            is_held = _is_held(counts.token_ids, self._tokens)
            num_times = counts.num_in_output[is_held]
            amounts = rules.frequency_penalty * num_times + rules.presence_penalty * (num_times > 0)
            factors = np.full_like(amounts, rules.repetition_penalty)
            values = np.stack([factors, amounts], axis=1, dtype=np.float32, casting="same_kind")
            self._penalised.add(row, counts.token_ids[is_held] - self._tokens.start, values)
        if rules.bad_words:
            self._masked.add(row, shaping.banned)
            self._masked.add(row, shaping.closed_by(history))


def apply_token_masks(
    logits: Tensor, rows: Sequence[int], masks: Sequence[TokenMask], first_token: int
) -> None:
    """Sets the logits of tokens that a row's mask does not allow to -inf, in place.

    logits: [num_rows, num_tokens], of the tokens from first_token on. masks: one for each row of
    `rows`.
    """
    tokens = range(first_token, first_token + logits.shape[1])
    for run in _runs(rows):
        # numpy spreads bits some 50 times as fast as torch does on a CPU.
        is_forbidden = torch.from_numpy(_forbidden(masks[run], tokens)).to(logits.device)
        first_row = rows[run.start]
        logits[first_row : first_row + len(is_forbidden)].masked_fill_(is_forbidden, -torch.inf)


@dataclass
class _Entries:
    """Some entries of a matrix, each at most once, and what is to be done to them."""

    _rows: list[NDArray[np.int64]] = field(default_factory=list)
    _columns: list[Columns] = field(default_factory=list)
    _values: list[NDArray[np.float32]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, columns: Columns, values: NDArray[np.float32] | None = None) -> None:
        """values: one for each column, or some."""
        if len(columns):
            self._rows.append(np.full(len(columns), row, dtype=np.int64))
            self._columns.append(columns)
            self._values.append(np.zeros(0, dtype=np.float32) if values is None else values)

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Index and values."""
        rows, columns, values = (
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (self._rows, self._columns, self._values)
        )
        return (rows, columns), values


def _penalise(logits: Tensor, factors: Tensor, amounts: Tensor) -> Tensor:
    """All [num_entries]. The repetition penalty comes before the other two."""
    return torch.where(logits > 0, logits / factors, logits * factors) - amounts


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Parts of `rows` that follow each other in the matrix, so that they are changed at once."""
    start = 0
    for end in range(1, len(rows) + 1):
        is_full = end - start == _ROWS_PER_SLAB
        if is_full or end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield slice(start, end)
            start = end


def _forbidden(masks: Sequence[TokenMask], tokens: range) -> NDArray[np.bool_]:
    """[num_masks, num_tokens]."""
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


def _num_words(num_tokens: int) -> int:
    return -(-num_tokens // _BITS_PER_WORD)


def _intersection(first: TokenMask | None, second: TokenMask | None) -> TokenMask | None:
    if first is None or second is None:
        return second if first is None else first
    num_words = min(len(first), len(second))
    return first[:num_words] & second[:num_words]


def _columns(token_ids: list[int] | tuple[int, ...], tokens: range) -> Columns:
    ids = np.array(token_ids, dtype=np.int64)
    return ids[_is_held(ids, tokens)] - tokens.start


def _is_held(token_ids: NDArray[np.int64], tokens: range) -> NDArray[np.bool_]:
    return (token_ids >= tokens.start) & (token_ids < tokens.stop)
