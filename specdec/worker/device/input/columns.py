"""The rows of a step by column: their numbers for hundreds of sequences at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.types.messages import BASE_MODEL, PENDING_TOKEN, RowDrafting, StepRow
from specdec.worker.device.input.rows import is_prompt, num_drafts


class StepColumns:
    """The fields of one row or more as columns, and numbers that follow from them.

    Columns are tuples, since arrays would cost more than they save in a step of one row. The host
    runs rows with lookahead tokens; the numbers of tokens are those of other rows.

    num_drafts: draft tokens of each row, of one whose drafts the device holds at most. num_tokens:
    of all rows with these. has_prompts: whether there is a part of a prompt, as `is_prompt` has it.
    has_held_drafts: whether the device holds drafts of a row, or has held them.
    """

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self.rows = rows
        self._fields = _columns(StepRow._fields, rows)
        self._fields |= _columns(RowDrafting._fields, self["drafting"])
        self._token_ids: tuple[tuple[int, ...], ...] = self["token_ids"]
        self._lengths = [*map(len, self._token_ids)]
        own_drafts: Sequence[int] = self["num_draft_tokens"]
        self.has_held_drafts = any(self["num_held"])
        self.num_drafts = [*map(num_drafts, rows)] if self.has_held_drafts else own_drafts
        self._num_before = sum(self._lengths) - sum(own_drafts) - len(rows)
        self.has_prompts = self._num_before > 0 or not all(self["samples"])
        self.num_tokens = len(rows) + self._num_before + sum(self.num_drafts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        """Return a field of all rows, or of their drafting."""
        return self._fields[name]

    @property
    def has_adapters(self) -> bool:
        """Return whether a row has an adapter."""
        return self["adapter_id"].count(BASE_MODEL) < len(self)

    @property
    def has_trees(self) -> bool:
        """Return whether the drafts of a row are a tree, or may be one that the device holds."""
        if any(self["parents"]):
            return True
        return any(self["held_depth"]) and any(
            row.is_pending and row.drafting.held_depth for row in self.rows
        )

    @property
    def grows_trees(self) -> bool:
        """Return whether a head is to draft a tree after a row."""
        return any(self["next_depth"]) and any(
            row.samples and row.drafting.next_depth for row in self.rows
        )

    @property
    def num_next_drafts(self) -> Sequence[int]:
        """Draft tokens that the head makes after each row, 0 where it does not sample."""
        if not any(self["num_next"]):
            return self["num_next"]
        return [row.drafting.num_next * row.samples for row in self.rows]

    @property
    def num_lookups(self) -> Sequence[int]:
        """Draft tokens to look up after each row, 0 where it does not sample."""
        if not any(self["num_lookup"]):
            return self["num_lookup"]
        return [row.drafting.num_lookup * row.samples for row in self.rows]

    @property
    def has_head_prompts(self) -> bool:
        """Return whether the head runs a part of a prompt."""
        return any(row.drafting.num_next and is_prompt(row) for row in self.rows)

    @property
    def is_pending(self) -> NDArray[np.bool_]:
        """Return for each row whether the device has its token, [num_rows]."""
        return _bools([each[0] == PENDING_TOKEN for each in self._token_ids])

    @property
    def samples(self) -> NDArray[np.bool_]:
        """Return for each row whether it samples, [num_rows]."""
        return _bools(self["samples"])

    @property
    def starts(self) -> Sequence[int]:
        """Position of the last known token of each row."""
        if not self._num_before:
            return self["num_computed_tokens"]
        return [row.known_end - 1 for row in self.rows]

    def write_tokens(self, table: NDArray[np.int64]) -> None:
        """Write the last known token and the drafts of each row to zeros, [num_rows, Q].

        0 stays where the device has the token.
        """
        parts, lengths = self._token_ids, self._lengths
        if self._num_before:
            parts = tuple(row.token_ids[row.num_known_tokens - 1 :] for row in self.rows)
            lengths = [*map(len, parts)]
        tokens = np.fromiter(chain.from_iterable(parts), np.int64, sum(lengths))
        np.maximum(tokens, 0, out=tokens)
        longest = max(lengths)
        if longest * len(lengths) == len(tokens):
            table[:, :longest] = tokens.reshape(len(lengths), longest)
        else:
            table[np.arange(table.shape[1]) < np.array(lengths)[:, None]] = tokens


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return the fields of one tuple or more by name; rows may share a tuple."""
    first, count = rows[0], len(rows)
    if first is rows[-1] and rows.count(first) == count:
        return {name: (value,) * count for name, value in zip(names, first, strict=True)}
    columns: Iterable[tuple[Any, ...]] = zip(*rows, strict=True)
    return dict(zip(names, columns, strict=True))


def _bools(values: Sequence[bool]) -> NDArray[np.bool_]:
    """Return values as an array; by way of bytes it takes a fifth of the time."""
    return np.frombuffer(bytes(values), np.bool_)
