"""A draft model in another process, reached by a pipe: torch alone, without Ray or a transport."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specdec.config.engine import DraftLimits
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.draft_messages import AheadOutput, DraftOutput, DraftStep
from specdec.types.errors import DraftFailedError
from specdec.worker import DraftModelRunner, RankModel, load_warm

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_READY, _CAUGHT_UP = "ready", "caught up"

_Message = DraftOutput | AheadOutput | str
"""From the process: outputs, _READY once, and _CAUGHT_UP after the rows of a step."""


class DraftProcess:
    """The draft model; see DraftWorker. Steps are pickled, which costs some 0.1 ms each way."""

    def __init__(
        self, directory: Path, limits: DraftLimits, device: str, cores: tuple[int, ...]
    ) -> None:
        """Start the process on `cores`, and wait until it has loaded the model, in float32.

        Raises TimeoutError, or DraftFailedError where it ends.
        """
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, other = context.Pipe()
        arguments = other, directory, limits, device, cores
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()  # so that the end of the process closes the pipe
        self._drafts: list[DraftOutput] = []
        self._ahead: list[AheadOutput] = []
        self._num_ahead = self._num_catching_up = 0  # answers that have not arrived
        if not self._pipe.poll(_START_TIMEOUT_S):
            self.close()
            raise TimeoutError(f"the draft model was not loaded within {_START_TIMEOUT_S:.0f} s")
        assert self._received() == _READY

    def begin(self, step: DraftStep) -> None:
        """Send a step."""
        self._num_ahead += bool(step.ahead)
        self._num_catching_up += bool(step.rows)
        self._pipe.send(step)

    def collect(self) -> DraftOutput:
        """Wait for the drafts of the last step. Raises DraftFailedError."""
        while not self._drafts:
            self._take()
        return self._drafts.pop(0)

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return drafts ahead, as DraftWorker does. Raises DraftFailedError."""
        while self._num_ahead and (wait or self._pipe.poll()):
            self._take()
        outputs, self._ahead = self._ahead, []
        return outputs

    def poll_busy(self) -> bool:
        """Return whether an earlier step's catch-up text is still running."""
        while self._num_catching_up and self._pipe.poll():
            self._take()
        return self._num_catching_up > 0

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(_END_TIMEOUT_S)
        self._process.kill()
        self._process.join()

    def _take(self) -> None:
        """Wait for an answer, and keep it."""
        message = self._received()
        if isinstance(message, DraftOutput):
            self._drafts.append(message)
        elif isinstance(message, AheadOutput):
            self._num_ahead -= 1
            self._ahead.append(message)
        else:
            self._num_catching_up -= 1

    def _received(self) -> _Message:
        try:
            message: _Message = self._pipe.recv()
        except EOFError as error:
            raise DraftFailedError("the process of the draft model has ended") from error
        return message


def _serve(
    pipe: Connection, directory: Path, limits: DraftLimits, device: str, cores: tuple[int, ...]
) -> None:
    """Load the model and answer steps until the pipe is closed."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    model = RankModel(directory, "float32", limits, device=torch.device(device))
    runner = load_warm(model, TensorParallelGroup())
    assert isinstance(runner, DraftModelRunner)
    pipe.send(_READY)
    try:
        while True:
            for message in _answers(runner, pipe.recv(), pipe):
                pipe.send(message)
    except (EOFError, BrokenPipeError):
        return


def _answers(runner: DraftModelRunner, step: DraftStep, pipe: Connection) -> Iterator[_Message]:
    """Execute a step, and yield each answer before the work that follows it."""
    drafts = runner.draft(step)
    if step.drafts:
        yield drafts
    if step.rows:
        runner.catch_up(step)
        yield _CAUGHT_UP
    if step.ahead:
        yield runner.draft_ahead(step, partial(pipe.poll, 0))
