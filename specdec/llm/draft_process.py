"""A draft model in a separate process, as in a service, for the measurement of its speed.

Its threads and those of the target compete for the cores, which costs more than the messages.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from specdec.config.engine import DraftLimits
from specdec.config.hardware import available_cpus
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.errors import DraftFailedError
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.ranks import Target
from specdec.types.trial_sequences import TrialSequences
from specdec.worker import DraftModelRunner, LocalDraftWorker, RankModel, load_warm

_CONTEXT_TOKENS = 64
_TOKEN = 1
_STOP_TIMEOUT_S = 5.0


class DraftProcess:
    """A process with a draft model and one sequence. A context manager, which ends the process."""

    def __init__(self, model: RankModel, most: int) -> None:
        """Start to load; `most`: draft tokens of the longest draft."""
        assert isinstance(model.limits, DraftLimits)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_draft, args=(theirs, model), name="draft model", daemon=True
        )
        self._process.start()
        theirs.close()
        limits = model.limits
        text = (_TOKEN,) * min(_CONTEXT_TOKENS, limits.max_model_len - most - 1)
        self._start = len(text)
        num_slots = self._start + 1 + most
        self._sequence = TrialSequences([text], num_slots, limits.block_size, limits.num_blocks)

    def __enter__(self) -> Self:
        """Wait until the model is loaded. Raises DraftFailedError."""
        admitted = self._sequence
        try:
            self._exchange(DraftStep(0, (), admitted.admissions, admitted.block_tables, (), ()))
        except DraftFailedError:
            self._end()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process."""
        self._end()

    def _end(self) -> None:
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)
        self._process.kill()

    def draft(self, num_draft_tokens: int) -> None:
        """Draft this many tokens, and wait for them. Raises DraftFailedError."""
        row = DraftRow(0, self._start, (_TOKEN,), num_draft_tokens, self._start + 1)
        self._exchange(DraftStep(0, (), (), (), (), (row,)))

    def _exchange(self, step: DraftStep) -> None:
        try:
            self._connection.send(step)
            self._connection.recv()
        except (EOFError, OSError) as error:
            raise DraftFailedError("the process of the draft model has ended") from error


def _draft(connection: Connection, model: RankModel) -> None:
    """Run a draft model's steps until the other end is closed."""
    torch.set_num_threads(available_cpus())  # as a rank of a service has
    runner = load_warm(model, TensorParallelGroup())
    assert isinstance(runner, DraftModelRunner)
    worker = LocalDraftWorker(runner)
    with suppress(EOFError):
        while True:
            step: DraftStep = connection.recv()
            worker.begin(step)
            connection.send(worker.collect() if step.drafts else None)


class DraftingTarget:
    """Target whose steps with drafts begin when a draft model has made as many; see Target."""

    def __init__(self, target: Target, draft: Callable[[int], None]) -> None:
        """draft: makes a number of draft tokens."""
        self._target, self._draft = target, draft

    def begin(self, step: StepInput) -> None:
        """Draft as many tokens as the step has, then begin it."""
        count = max((row.num_draft_tokens for row in step.rows), default=0)
        if count:
            self._draft(count)
        self._target.begin(step)

    def collect(self) -> VerifyOutput:
        """See Target."""
        return self._target.collect()
