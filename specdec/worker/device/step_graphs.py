"""Shapes of the steps that a device runs, and the graphs that are captured for them.

A graph replays all launches of a step in one call. It has fixed shapes, so a step is padded to the
next captured one. All graphs are captured before the rank is ready: none is made in a step.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch

from specdec.config.gpu.graph_sizes import (
    MAX_GRAPH_ROWS,
    MAX_GRAPH_TOKENS,
    query_lens,
    ragged_row_counts,
    row_counts,
    tree_lens,
)
from specdec.sampling.device.device_sampler import SamplingKind

Launch = Callable[["StepShape"], None]
"""Launches a stage of a step of this shape on the static buffers; returns before it has run."""

LaunchRagged = Callable[["RaggedShape"], None]
"""Launches the pass of a step with prompts in the same way."""

Replay = Callable[[], None]

_MIB = 2**20


class Part(StrEnum):
    """Part of a step.

    ADAPTED_FORWARD is the pass with adapters. A head with KV computes FEATURES after the pass, and
    PAIRS after SAMPLING; then DRAFT and ADVANCE in turn make a draft token of each row, or BLOCK
    runs the layers for all tokens. A head without KV has START after SAMPLING. After BLOCK and
    START, CHAIN selects all tokens of the drafts, of which the query length counts one more. TREE
    makes a whole tree of each row in place of these. LOOKUP finds drafts in the texts.
    """

    FORWARD = "forward"
    ADAPTED_FORWARD = "adapted forward"
    SAMPLING = "sampling"
    FEATURES = "features"
    PAIRS = "pairs"
    DRAFT = "draft"
    TREE = "tree"
    ADVANCE = "advance"
    BLOCK = "block"
    START = "start"
    LOOKUP = "lookup"
    CHAIN = "chain"


_OF_ONE_TOKEN = (Part.TREE, Part.DRAFT, Part.ADVANCE)
"""Each row has one token to begin with, whatever it has in the step."""

_OF_DRAFTS = (Part.BLOCK, Part.CHAIN)

_WITH_TREES = (Part.FORWARD, Part.ADAPTED_FORWARD, Part.SAMPLING, Part.FEATURES, Part.PAIRS)


class Stage(NamedTuple):
    """A part of a step that is a graph; kind: of what it samples, if it does."""

    part: Part
    kind: SamplingKind | None = None

    def runs_in(self, shape: StepShape) -> bool:
        """Return whether the stage is a graph in a shape."""
        if shape.has_trees:
            return self.part in _WITH_TREES
        if self.part in _OF_ONE_TOKEN:
            return shape.query_len == 1
        return shape.query_len > 1 or self.part not in _OF_DRAFTS


def stages_of_kinds(
    part: Part, launch: Callable[[SamplingKind, StepShape], None]
) -> dict[Stage, Launch]:
    """Return the launches of a part for each kind of sampling."""
    return {
        Stage(part, kind): torch.inference_mode()(partial(launch, kind)) for kind in SamplingKind
    }


class StepShape(NamedTuple):
    """Shape of the tensors of a step.

    num_rows: sequences. query_len: tokens of each. num_blocks: width of the block tables.
    has_trees: whether some drafts are a tree.
    """

    num_rows: int
    query_len: int
    num_blocks: int
    has_trees: bool = False


class RaggedShape(NamedTuple):
    """Shape of a pass over sequences with different numbers of tokens.

    num_tokens: of all sequences. num_rows: sequences, with or without tokens. num_blocks,
    has_trees: as in StepShape. has_adapters: whether some token has one.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    has_adapters: bool = False
    has_trees: bool = False


class GraphCaptureError(RuntimeError):
    """Work of a step that runs, but of which the device can make no graph."""


class GraphBackend(Protocol):
    """Captures the launches of a function, to be replayed."""

    def capture(self, function: Callable[[], None]) -> Replay:
        """Run the function once or more, and return how to launch the same work again.

        Raises GraphCaptureError where it runs and cannot be captured.
        """

    @property
    def num_bytes(self) -> int:
        """Device memory that all graphs take."""


class CudaGraphs:
    """CUDA graphs that share one pool of memory; they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # one, so that libraries have one workspace
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.num_bytes = 0  # see GraphBackend

    def capture(self, function: Callable[[], None]) -> Replay:
        """See GraphBackend. The first run, outside of the graph, loads kernels and libraries.

        `torch.cuda.graph` would return the memory of that run to the driver at each of hundreds of
        captures; here the next one uses it again.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
            torch.cuda.synchronize(self._device)
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            graph = self._captured(function)
        current.wait_stream(self._stream)
        self.num_bytes += max(0, free_bytes - torch.cuda.mem_get_info(self._device)[0])
        return graph.replay

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture on the current stream.

        Only calls of this thread may fail it: that of NCCL which watches for errors queries events
        meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:  # of CUDA, and of memory
            reason = f"{error}; --enforce-eager runs without graphs"
            raise GraphCaptureError(f"a graph could not be captured: {reason}") from error
        return graph


@dataclass(frozen=True)
class GraphReport:
    """The captured graphs, for the log at start-up.

    max_rows, max_query_len: of the largest step with graphs. max_ragged_tokens: of the largest step
    with prompts that has one; 0 where these have none. max_tree_nodes: of the largest tree in a
    step with a graph; 0 where no drafts are trees. grows_trees: whether graphs draft trees.
    """

    max_rows: int
    max_query_len: int
    max_ragged_tokens: int
    max_tree_nodes: int
    grows_trees: bool
    num_graphs: int
    seconds: float
    num_bytes: int

    def describe(self) -> str:
        """Return a line for the log, with what has no graph."""
        if not self.num_graphs:
            return "no graphs: every step is launched operator by operator"
        prompts = f", and with prompts up to {self.max_ragged_tokens}"
        trees = f", with trees of up to {self.max_tree_nodes} drafts"
        by_host = self.max_tree_nodes and not self.grows_trees
        return (
            f"captured {self.num_graphs} graphs in {self.seconds:.1f} s and "
            f"{self.num_bytes / _MIB:.0f} MiB, for steps of up to {self.max_rows} sequences with "
            f"up to {self.max_query_len} tokens each and {MAX_GRAPH_TOKENS} in all"
            f"{trees if self.max_tree_nodes else ''}"
            f"{prompts if self.max_ragged_tokens else ''}; without a graph: larger steps, "
            f"{'' if self.max_ragged_tokens else 'prompts, '}"
            f"{'draft heads of trees, ' if by_host else ''}on torch's kernels steps "
            "with one row that has an adapter, and sampling where a row has a grammar, penalties, "
            "log-probabilities or a verifier other than coupled"
        )


class StepGraphs:
    """The graphs of a rank's steps, by stage and shape.

    A step of a shape without a graph is launched as it is. Without a backend there are none.
    """

    def __init__(
        self,
        backend: GraphBackend | None,
        *,
        max_num_seqs: int,
        max_draft_tokens: int,
        num_blocks: int,
        ragged_tokens: Sequence[int] = (),
        has_adapters: bool = False,
        max_tree_nodes: int = 0,
        max_growing_rows: int = MAX_GRAPH_ROWS,
    ) -> None:
        """num_blocks: width of the block tables of all graphs.

        ragged_tokens: of the steps with prompts that have a graph, ascending. has_adapters: whether
        there are steps with adapters on the device. max_tree_nodes: of a tree of drafts; 0 where
        there are none. max_growing_rows: most sequences for which a head drafts trees.
        """
        self._may_have_adapters = (True, False) if has_adapters else (False,)
        self._may_have_trees = (True, False) if max_tree_nodes else (False,)
        self._max_growing_rows, self._backend = max_growing_rows, backend
        self._row_counts = row_counts(max_num_seqs)
        self._query_lens = {
            (rows, has_trees): tree_lens(max_tree_nodes, rows)
            if has_trees
            else query_lens(max_draft_tokens, rows)
            for rows in self._row_counts
            for has_trees in self._may_have_trees
        }
        self._num_blocks = num_blocks
        self._ragged_tokens, self._ragged_rows = ragged_tokens, ragged_row_counts(max_num_seqs)
        self._replays: dict[tuple[Stage, StepShape], Replay] = {}
        self._ragged: dict[RaggedShape, Replay] = {}

    def capture(
        self, stages: Mapping[Stage, Launch], prepare: Launch, ragged: LaunchRagged | None = None
    ) -> GraphReport:
        """Capture the graphs of every shape, largest first, so that they share their memory.

        prepare: fills the static buffers with a step of the shape, outside of its graphs. ragged:
        the pass of steps with prompts, whose buffers hold padding; None to keep its graphs.
        """
        started_at_s = time.perf_counter()
        if self._backend is not None:
            with _collector_off():
                if ragged is not None:
                    self._capture_ragged(self._backend, ragged)
                for shape in self._shapes():
                    prepare(shape)
                    self._capture_stages(self._backend, stages, shape)
        return GraphReport(
            self._row_counts[-1],
            max(self._query_lens[rows, False][-1] for rows in self._row_counts),
            max((shape.num_tokens for shape in self._ragged), default=0),
            max((shape.query_len - 1 for shape in self._shapes() if shape.has_trees), default=0),
            any(stage.part is Part.TREE for stage, _ in self._replays),
            len(self._replays) + len(self._ragged),
            time.perf_counter() - started_at_s,
            0 if self._backend is None else self._backend.num_bytes,
        )

    def _capture_stages(
        self, backend: GraphBackend, stages: Mapping[Stage, Launch], shape: StepShape
    ) -> None:
        for stage, launch in stages.items():
            grows_too_many = stage.part is Part.TREE and shape.num_rows > self._max_growing_rows
            if stage.runs_in(shape) and not grows_too_many:
                self._replays[stage, shape] = backend.capture(partial(launch, shape))

    def _capture_ragged(self, backend: GraphBackend, launch: LaunchRagged) -> None:
        for num_tokens in reversed(self._ragged_tokens):
            kinds = product(self._ragged_rows, self._may_have_adapters, self._may_have_trees)
            for num_rows, *has in kinds:
                shape = RaggedShape(num_tokens, num_rows, self._num_blocks, *has)
                self._ragged[shape] = backend.capture(partial(launch, shape))

    def close(self) -> None:
        """Destroy the graphs, which could not be destroyed while another one is captured."""
        self._replays.clear()
        self._ragged.clear()

    def padded(self, shape: StepShape) -> StepShape:
        """Return the smallest captured shape that holds a step; its own where there is none."""
        if not self._replays or shape.num_rows > self._row_counts[-1]:
            return shape
        num_rows = _at_least(self._row_counts, shape.num_rows)
        lens = self._query_lens.get((num_rows, shape.has_trees), [])
        if not lens or shape.query_len > lens[-1]:
            return shape
        query_len = _at_least(lens, shape.query_len)
        return StepShape(num_rows, query_len, self._num_blocks, shape.has_trees)

    def padded_ragged(self, shape: RaggedShape) -> RaggedShape:
        """Return the smallest captured shape that holds a pass; its own where there is none."""
        if not self._ragged or shape.num_tokens > self._ragged_tokens[-1]:
            return shape
        num_tokens = _at_least(self._ragged_tokens, shape.num_tokens)
        num_rows = _at_least(self._ragged_rows, shape.num_rows)
        return shape._replace(num_tokens=num_tokens, num_rows=num_rows, num_blocks=self._num_blocks)

    def run(self, stage: Stage, shape: StepShape, launch: Launch) -> None:
        """Launch a stage, by its graph if there is one. shape: as returned by `padded`."""
        self._replays.get((stage, shape), partial(launch, shape))()

    def run_ragged(self, shape: RaggedShape, launch: LaunchRagged) -> None:
        """Launch a pass as `run` does. shape: as returned by `padded_ragged`."""
        self._ragged.get(shape, partial(launch, shape))()

    def _shapes(self) -> list[StepShape]:
        return sorted(
            (
                StepShape(rows, length, self._num_blocks, has_trees)
                for (rows, has_trees), lens in self._query_lens.items()
                for length in lens
            ),
            reverse=True,
        )


@contextmanager
def _collector_off() -> Iterator[None]:
    """Collect garbage now, and none within.

    The collector destroys graphs that are part of a cycle of references, as those of an engine
    before this one may be. CUDA permits no such call while a stream of the thread is captured.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _at_least(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
