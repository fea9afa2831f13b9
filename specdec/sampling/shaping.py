"""What a request's parameters do to logits before they are scaled, cut and drawn from.

Penalties, biases and forbidden tokens change a few logits of a row each. They are collected on the
host as single entries of the matrix of logits, for all rows of a batch, and made together; a row
that asks for nothing costs nothing. Meanings and order are those of SamplingParams. A token that is
forbidden ends at -inf, whatever else changes it, so that part of the order makes no difference.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.sampling.token_history import TokenHistory
from specdec.sampling_rules import SamplingRules

_ROWS_PER_SLAB = 16
_BITS_PER_WORD = 32

Columns = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shaping:
    """The rules of one sequence that change logits, as columns of this rank's part of them.

    phrases: bad words of several tokens, by the token before the last.
    """

    rules: SamplingRules
    tokens: range
    allowed: Columns | None
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
            allowed=None if allowed is None else _columns(allowed, tokens),
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

    def changes(self, num_output_tokens: int) -> bool:
        """Whether the row after so many output tokens is changed at all."""
        return self.changes_every_row or num_output_tokens < self.rules.min_tokens

    def closed_by(self, history: TokenHistory) -> Columns:
        """The last tokens of the phrases whose other tokens have just been output."""
        last = history.token_ids[-1]
        words = [word for word in self.phrases.get(last, ()) if history.ends_with(word[:-1])]
        return _columns([word[-1] for word in words], self.tokens)

    def leaves_some(self, mask: NDArray[np.int32]) -> bool:
        """Whether a grammar's mask, [num_words], allows any token that does not end the text."""
        ends = np.array(self.rules.end_token_ids, dtype=np.int64)
        ends = ends[ends < len(mask) * _BITS_PER_WORD]
        end_bits = np.zeros(len(mask), dtype=np.uint32)
        np.bitwise_or.at(
            end_bits,
            ends // _BITS_PER_WORD,
            np.left_shift(np.uint32(1), (ends % _BITS_PER_WORD).astype(np.uint32)),
        )
        return bool((mask.view(np.uint32) & ~end_bits).any())


class LogitEdits:
    """What is to be done to the logits of one batch, [num_rows, num_tokens]: collect, then apply.

    All of it is known on the host, and the same on every rank but for which tokens it holds.
    """

    def __init__(self, tokens: range) -> None:
        """tokens: whose logits this rank has."""
        self._tokens = tokens
        self._kept = _Entries()
        self._biased = _Entries()
        self._penalised = _Entries()
        self._masked = _Entries()
        self._only_rows: list[int] = []
        self._masked_rows: set[int] = set()
        self._grammar_rows: list[int] = []
        self._grammar_masks: list[NDArray[np.int32]] = []
        self._is_empty = True

    @property
    def masked_rows(self) -> list[int]:
        """Rows in which tokens are forbidden, so that perhaps none is left."""
        return sorted(self._masked_rows)

    def add(
        self,
        row: int,
        shaping: Shaping,
        num_output_tokens: int,
        history: TokenHistory | None,
        grammar_mask: NDArray[np.int32] | None = None,
    ) -> None:
        """Takes in what the rules say of one row.

        num_output_tokens: how many there are before the token that the row is about. history: those
        tokens and the prompt, where the rules need tokens. grammar_mask: [num_words] int32.
        """
        rules = shaping.rules
        if grammar_mask is not None:
            self._grammar_rows.append(row)
            self._grammar_masks.append(grammar_mask)
            self._note_mask(row)
        if not shaping.changes(num_output_tokens):
            return
        self._is_empty = False
        if shaping.allowed is not None:
            self._only_rows.append(row)
            self._kept.add(row, shaping.allowed)
            self._note_mask(row)
        self._biased.add(row, shaping.biased, shaping.biases)
        if num_output_tokens < rules.min_tokens and (
            # A grammar that is at its end goes before min_tokens: nothing else could come.
            grammar_mask is None or shaping.leaves_some(grammar_mask)
        ):
            self._mask(row, shaping.ends)
        if history is not None:
            self._add_by_history(row, shaping, history)

    def apply(self, logits: Tensor) -> Tensor:
        """logits: [num_rows, num_tokens], changed in place where they are float32.

        Returns them with the edits made, in float32 if there are any.
        """
        if not self._is_empty:
            logits = logits.float()
            self._edit(logits)
        return logits

    def _edit(self, logits: Tensor) -> None:
        if self._only_rows:
            _keep_only(logits, self._only_rows, self._kept)
        if self._grammar_rows:
            rows = torch.tensor(self._grammar_rows, device=logits.device)
            masks = torch.from_numpy(np.stack(self._grammar_masks)).to(logits.device)
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
            self._mask(row, shaping.banned)
            self._mask(row, shaping.closed_by(history))

    def _mask(self, row: int, columns: Columns) -> None:
        self._masked.add(row, columns)
        self._note_mask(row)

    def _note_mask(self, row: int) -> None:
        """On every rank, whether or not it holds what is masked: ranks must agree."""
        self._masked_rows.add(row)
        self._is_empty = False


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor, first_token: int) -> None:
    """Sets the logits of tokens that a grammar does not allow to -inf, in place.

    logits: [num_rows, num_tokens], of the tokens from first_token on. rows: [num_masked] int64.
    masks: [num_masked, num_words] int32, whose word t // 32 has bit t % 32 set where token t may
    come; tokens beyond the last word may not.
    """
    first_byte, skipped = divmod(first_token, 8)
    num_bytes = -(-(skipped + logits.shape[1]) // 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for some_rows, words in zip(
        rows.split(_ROWS_PER_SLAB), masks.split(_ROWS_PER_SLAB), strict=True
    ):
        bytes_of_rows = words.contiguous().view(torch.uint8)[:, first_byte : first_byte + num_bytes]
        bits = (bytes_of_rows.unsqueeze(2) >> shifts & 1).flatten(1)[:, skipped:]
        allowed = torch.zeros(len(words), logits.shape[1], dtype=torch.bool, device=logits.device)
        held = bits[:, : logits.shape[1]]
        allowed[:, : held.shape[1]] = held
        logits[some_rows] = logits[some_rows].masked_fill_(~allowed, -torch.inf)


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


def _keep_only(logits: Tensor, rows: list[int], kept: _Entries) -> None:
    if not kept:  # what is allowed is on other ranks
        logits[rows] = -torch.inf
        return
    places, _ = kept.on(logits.device)
    values = logits[places]
    logits[rows] = -torch.inf
    logits[places] = values


def _penalise(logits: Tensor, factors: Tensor, amounts: Tensor) -> Tensor:
    """All [num_entries]. The repetition penalty comes before the other two."""
    return torch.where(logits > 0, logits / factors, logits * factors) - amounts


def _columns(token_ids: list[int] | tuple[int, ...], tokens: range) -> Columns:
    ids = np.array(token_ids, dtype=np.int64)
    return ids[_is_held(ids, tokens)] - tokens.start


def _is_held(token_ids: NDArray[np.int64], tokens: range) -> NDArray[np.bool_]:
    return (token_ids >= tokens.start) & (token_ids < tokens.stop)
