"""Audit of answers: replays them on the engine while no request runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from specdec.engine.metrics.metrics import Metrics
from specdec.engine.receipts.issuing import Answer
from specdec.engine.receipts.report import ChoiceReport, ReceiptReport
from specdec.engine.requests.engine_client import EngineClient
from specdec.engine.requests.replays import comparison_in, replay_request
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_spec import Replay

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Answers that wait for an audit; a further one replaces the oldest, which counts as dropped."""
_DROPPED, _FAILED = "dropped", "failed"

_LEAST_PRIORITY = 1000
_POLL_S = 0.05
_RETRY_S = 0.05, 1.0
_MAX_WAIT_S = 600.0


class Auditor:
    """Queue of answers to audit, and the task that replays them, for one event loop.

    A replay begins when the engine is idle. It is aborted within 50 ms of the arrival of a request,
    and tried again; until then they share steps, in which the replay comes last.
    """

    def __init__(
        self, get_client: Callable[[], EngineClient], metrics: Metrics, tolerance: float
    ) -> None:
        self._get_client, self._metrics, self._tolerance = get_client, metrics, tolerance
        self._waiting: deque[tuple[Answer, float]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, answer: Answer) -> None:
        """Queue a complete answer, and start the task unless it runs."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._metrics.count_audit(_DROPPED)
        self._waiting.append((answer, time.monotonic()))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task; the answers that it has not audited count as dropped."""
        for _ in self._waiting:
            self._metrics.count_audit(_DROPPED)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            answer, since_s = self._waiting.popleft()
            try:
                while not await self._audited(answer):
                    if time.monotonic() - since_s > _MAX_WAIT_S:
                        self._metrics.count_audit(_DROPPED)
                        break
                    # At random, so that the audits of several front ends do not meet again.
                    await asyncio.sleep(random.uniform(*_RETRY_S))
            except NotReadyError:  # the engine has begun to stop
                self._metrics.count_audit(_DROPPED)
            except asyncio.CancelledError:
                self._metrics.count_audit(_DROPPED)
                raise
            except Exception as error:
                self._fail(answer, "comparison of the outcome", error)

    async def _audited(self, answer: Answer) -> bool:
        """Replay all choices of an answer and count the result; return False for a busy engine.

        Raises NotReadyError.
        """
        reports, num_resumed = [], len(answer.request.resume_token_ids)
        for index, tokens in sorted(answer.outputs.items()):
            replay = Replay(tuple(tokens), index, self._tolerance)
            try:
                found = await self._compared(answer, replay)
            except NotReadyError:
                raise
            except Exception as error:
                self._fail(answer, f"replay of choice {index}, {len(tokens)} tokens", error)
                return True
            if found is None:
                return False
            report = ChoiceReport(index, len(tokens), num_resumed)
            reports.append(report.with_tokens(found, self._tolerance))
        for report in reports:
            if (wrong := report.impossible) is not None:
                place = answer.request.request_id, report.index, wrong.position, wrong.margin
                logger.error("audit of request %s: choice %d, position %d, margin %s", *place)
        outcome = ReceiptReport.of(tuple(reports), self._tolerance).outcome
        num_compared = sum(len(tokens) - num_resumed for tokens in answer.outputs.values())
        self._metrics.count_audit(outcome.value, num_compared)
        return True

    def _fail(self, answer: Answer, check: str, error: Exception) -> None:
        place = answer.request.request_id, check, *_cause(error)
        logger.warning("audit of request %s failed: %s: %s in %s", *place)
        self._metrics.count_audit(_FAILED)

    async def _compared(self, answer: Answer, replay: Replay) -> Logprobs | None:
        """Return the comparison of one choice; None if other requests run or arrive."""
        client = self._get_client()
        if client.num_sequences:
            return None
        running = asyncio.create_task(self._replay(client, answer, replay))
        try:
            while not running.done() and client.num_sequences <= 1:
                await asyncio.wait((running,), timeout=_POLL_S)
            return running.result() if running.done() else None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _replay(self, client: EngineClient, answer: Answer, replay: Replay) -> Logprobs:
        request = replay_request(answer.request, replay, priority=_LEAST_PRIORITY)
        async with aclosing(client.generate(request)) as outputs:
            return await comparison_in(outputs)


def _cause(error: Exception) -> tuple[str, str]:
    """Return the kind of an error and its place; not its text.

    That, and the value of an InvalidValueError, may quote tokens.
    """
    field = f" of {error.field}" if isinstance(error, InvalidValueError) else ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}{field}", place
