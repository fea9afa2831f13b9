"""Differences between workers of the target and of a draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.rank.actor import DraftWorker, TargetWorker, Worker
from specdec.sequences.decode_rows import RepeatedRows
from specdec.types.draft_messages import DraftOutput, DraftStep
from specdec.types.errors import DraftFailedError, TargetFailedError
from specdec.types.messages import StepInput, VerifyOutput

StepT = TypeVar("StepT", bound=StepInput | DraftStep)
OutputT = TypeVar("OutputT", bound=VerifyOutput | DraftOutput)


@dataclass(frozen=True)
class Role(Generic[StepT, OutputT]):
    """The differences between workers of the target and of a draft model.

    error: raised when a rank is lost. empty_step: changes nothing; every rank answers it once it is
    warm. has_output, catches_up, drafts_ahead: whether rank 0 answers a step with an output,
    whether it then reports that it has caught up, and whether it answers with drafts made ahead.
    """

    actor: type[Worker]
    error: type[TargetFailedError | DraftFailedError]
    encode: Callable[[StepT], Frames]
    decode: Callable[[Frames], OutputT]
    empty_step: StepT
    has_output: Callable[[StepT], bool] = lambda _: True
    catches_up: Callable[[StepT], bool] = lambda _: False
    drafts_ahead: Callable[[StepT], bool] = lambda _: False


TARGET = Role(
    TargetWorker,
    TargetFailedError,
    serialization.encode_step,
    serialization.decode_output,
    StepInput(-1, (), (), (), ()),
)
DRAFT = Role(
    DraftWorker,
    DraftFailedError,
    draft_serialization.encode_draft_step,
    draft_serialization.decode_draft_output,
    DraftStep(-1, (), (), (), (), ()),
    has_output=lambda step: bool(step.drafts),
    catches_up=lambda step: bool(step.rows) or not (step.drafts or step.ahead),
    drafts_ahead=lambda step: bool(step.ahead),
)


def num_tokens(step: StepInput | DraftStep) -> int:
    """Return the size of a step: tokens that its ranks run, one after the other for drafts."""
    num_repeated, rows = 0, step.rows
    if isinstance(rows, RepeatedRows):
        num_repeated, rows = len(rows.first), rows.joining
    num_tokens = num_repeated + sum(len(row.token_ids) for row in rows)
    if isinstance(step, DraftStep):
        drafted = (len(row.token_ids) + row.num_draft_tokens for row in step.drafts)
        num_tokens += sum(drafted) + sum(row.num_nodes for row in step.ahead)
    return num_tokens
