"""Ranks as separate processes, as in a cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# Forked from a process that has imported torch and has never used its threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "specdec.worker", "tests.specdec.processes"])


@dataclass(frozen=True)
class Outcome:
    """The outcome of a rank: a result, or an error, or neither if it was killed."""

    result: Any = None
    error: Exception | None = None


def run_processes(
    size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Outcome]:
    """Return the outcome of `work(rank, size, *args)` on each rank; kills all ranks at the end."""
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        _CONTEXT.Process(target=_report, args=(sender, work, rank, size, *args))
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        return [_outcome(receiver, timeout_s) for receiver, _ in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def results(outcomes: list[Outcome]) -> list[Any]:
    """Return the results of all ranks; raises the first error."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def _report(sender: Connection, work: Callable[..., Any], *args: Any) -> None:
    try:
        outcome = Outcome(work(*args))
    except Exception as error:
        outcome = Outcome(error=error)
    sender.send(outcome)


def _outcome(receiver: Connection, timeout_s: float) -> Outcome:
    assert receiver.poll(timeout_s), "a rank does not end"
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        return Outcome()
    return outcome
