"""The host's side of a step on the device: its input, and the result that the host waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.types.drafts.draft_tree import is_chain
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_spec import ListedTokens
from specdec.worker.device.input.draft_layout import NO_DRAFTS, DraftLayout
from specdec.worker.device.step_graphs import StepShape

_CACHED_SIZES = 256
"""Sizes of steps, in rows and tokens, whose parts of a buffer are kept."""


@dataclass(frozen=True)
class StepBuffers:
    """Static buffers of steps on the device.

    output: drafts of all rows, if there are any, then the results of all rows. hidden: states of
    the last known tokens and the drafts.
    """

    input: Tensor  # [words] int64
    output: Tensor  # [words] int64
    hidden: Tensor  # [max_scored_tokens, hidden_size]
    layout: DraftLayout

    def drafts(self, num_rows: int) -> Tensor:
        """Return the part of the output with the drafts of the first rows, [num_rows, width]."""
        return self.output[: num_rows * self.layout.width].view(num_rows, -1)

    def results(self, shape: StepShape) -> Tensor:
        """Return the part with the results of a step, [num_rows, 1 + Q]: a number, then tokens."""
        start = shape.num_rows * self.layout.width
        end = start + shape.num_rows * (1 + shape.query_len)
        return self.output[start:end].view(shape.num_rows, -1)


class HostOutput(NamedTuple):
    """Output of a step on the host, valid after an event that is recorded once it was received."""

    results: Tensor  # [num_rows, 1 + Q] int64
    drafts: Tensor  # [num_rows, layout.width] int64


class HostBuffer:
    """Input and output of one step on the host, in memory that a device copies from and to.

    The parts that a step copies are kept by its sizes: to make them takes longer than to launch the
    copies.
    """

    def __init__(self, static: StepBuffers) -> None:
        """Make a buffer that is copied to and from the static buffers of steps."""
        is_pinned = static.input.device.type == "cuda"
        zeros = partial(torch.zeros, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        self.input, self.output = zeros(len(static.input)), zeros(len(static.output))
        self.words: NDArray[np.int64] = self.input.numpy()
        self._inputs = lru_cache(_CACHED_SIZES)(partial(_input_parts, static, self.input))
        self._outputs = lru_cache(_CACHED_SIZES)(partial(_output_parts, static, self.output))

    def send(self, num_words: int) -> None:
        """Begin the copy of the first words to the device."""
        on_device, on_host = self._inputs(num_words)
        on_device.copy_(on_host, non_blocking=True)

    def receive(self, shape: StepShape, num_rows: int) -> HostOutput:
        """Begin the copy of the output of a step from the device; num_rows: without padding."""
        on_device, on_host, output = self._outputs((shape.num_rows, shape.query_len), num_rows)
        on_host.copy_(on_device, non_blocking=True)
        return output


def _input_parts(static: StepBuffers, own: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """Return the first words on the device and on the host."""
    return static.input[:num_words], own[:num_words]


def _output_parts(
    static: StepBuffers, own: Tensor, shape: tuple[int, int], num_rows: int
) -> tuple[Tensor, Tensor, HostOutput]:
    """Return the output of a step on the device and on the host, and there that of some rows.

    shape: rows with padding, and tokens of each.
    """
    num_padded, query_len = shape
    draft_size = num_padded * static.layout.width
    size = draft_size + num_padded * (1 + query_len)
    drafts, results = (
        part.view(num_padded, -1)[:num_rows] for part in (own[:draft_size], own[draft_size:size])
    )
    return static.output[:size], own[:size], HostOutput(results, drafts)


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of all places of some rows of a step that the device runs.

    listed: by row of the step, in the order of the table, what it requests.
    """

    table: Tensor  # [len(listed) * Q, 1 + 2 * (1 + n)] int32 on the host, of `logprob_table`
    listed: Mapping[int, ListedTokens]

    def of_rows(self, tokens: Sequence[tuple[int, ...]]) -> list[Logprobs | None]:
        """Return those of the new tokens of each row, None where there are none."""
        found: list[Logprobs | None] = [None] * len(tokens)
        query_len = len(self.table) // len(self.listed)
        most_given = max(len(each.token_ids) for each in self.listed.values())
        for place, (row, (num_best, given)) in enumerate(self.listed.items()):
            if tokens[row]:
                start = place * query_len
                own = self.table[start : start + len(tokens[row])].numpy()
                ids, logprobs = np.split(own[:, 1:], 2, 1)
                whole = Logprobs(ids, logprobs.view(np.float32), own[:, 0], most_given)
                found[row] = whole.best(num_best, len(given))
        return found


@dataclass(frozen=True)
class PendingTokens:
    """The new tokens of a step that the device runs."""

    # Both int64 on the host: in a row the number of tokens, then tokens.
    _result: Tensor  # [num_rows, 1 + Q]
    _drafts: Tensor | None  # [num_rows, layout.width]; None where nothing was drafted
    _done: torch.cuda.Event | None  # None where the device is the host
    _logprobs: PendingLogprobs | None = None
    _layout: DraftLayout = NO_DRAFTS
    _has_trees: bool = False
    _has_lookups: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether the step has ended."""
        return self._done is None or self._done.query()

    def collect(self) -> list[tuple[int, ...]]:
        """Wait for the step; return the new tokens of each row, none for invalid logits."""
        if self._done is not None:
            self._done.synchronize()
        return _listed(self._result)

    def drafts(self) -> list[tuple[int, ...]]:
        """Return what was drafted after each row; call it after `collect`."""
        if self._drafts is None:
            return [()] * len(self._result)
        return _listed(self._layout.tokens(self._drafts))

    def parents(self, drafts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
        """Return the trees of drafts as `drafts` returns them; None for a chain."""
        if self._drafts is None or not self._has_trees:
            return [None] * len(drafts)
        rows = self._layout.parents(self._drafts).tolist()
        found = [tuple(own[: len(draft)]) for own, draft in zip(rows, drafts, strict=True)]
        return [None if is_chain(parents) else parents for parents in found]

    def confidences(self, drafts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the confidences in drafts as `drafts` returns them; none without confidences."""
        if self._drafts is None:
            return [()] * len(drafts)
        found = self._layout.confidences(self._drafts).tolist()
        return [tuple(own[: len(draft)]) for own, draft in zip(found, drafts, strict=True)]

    def lookups(self, drafts: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return which drafts are of a lookup. drafts: as `drafts` returns them."""
        if self._drafts is None or not (self._has_lookups and self._layout.has_lookups):
            return [False] * len(drafts)
        return [bool(each) for [each] in self._layout.lookups(self._drafts).tolist()]

    def logprobs(self, tokens: Sequence[tuple[int, ...]]) -> list[Logprobs | None]:
        """Return those of the new tokens of each row; call it after `collect` with its result."""
        return [None] * len(tokens) if self._logprobs is None else self._logprobs.of_rows(tokens)


def _listed(rows: Tensor) -> list[tuple[int, ...]]:
    """Return the tokens of rows, each with their number first."""
    return [tuple(tokens[:count]) for count, *tokens in rows.tolist()]


def copy_to_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one piece, without waiting; return a tensor for each."""
    sizes = [array.size for array in arrays]
    words = torch.empty(
        sum(sizes), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
    )
    np.concatenate([array.ravel() for array in arrays], out=words.numpy())
    parts = words.to(device, non_blocking=True).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def copy_to_host(values: Tensor) -> Tensor:
    """Return a copy of values, which are valid after an event that is recorded from now on."""
    is_pinned = values.device.type == "cuda"
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=is_pinned)
    return host.copy_(values, non_blocking=True)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after what the device was given so far; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
