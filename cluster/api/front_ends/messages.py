"""Messages between a Router and its front ends.

From the Router: START, STATE, STEP, SETTLED, EXPIRED, FAILED, ABORT, ITEM, ENDED, STOP. From a
front end: LISTENING, SUBMIT, WITHDRAW, SAMPLE, COUNTS, CALL, NEXT, CANCEL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.replica.router import RoutedModel
from specdec.types.errors import TargetFailedError

Kind = Literal[
    "start",  # Start: to serve
    "state",  # RouterState: from now on
    "step",  # outputs and newly scheduled ids of a step: `outputs.py`
    "settled",  # unique id, error or None: whether a request was accepted
    "expired",  # unique ids: of requests that were queued past their deadline
    "failed",  # error: of all streams
    "abort",  # AbortOrder
    "item",  # call, result: the next one of a call
    "ended",  # call, error or None: of a call
    "stop",  # no more requests come; end
    "listening",  # both ports are open
    "submit",  # EngineRequest, is_admitted
    "withdraw",  # unique id: its client has left
    "sample",  # tokens, num_prompt_tokens, temperature: see SampleBuffer.add
    "counts",  # Counts: all of this process
    "call",  # call, method, argument: of the Router
    "next",  # call: one more result is wanted
    "cancel",  # call: no more results are wanted
]


@dataclass(frozen=True)
class RouterState:
    """State of a Router that its front ends go by.

    why_not_ready: empty while it is ready. has_engine: whether the models are loaded. adapter_ids:
    see Router.
    """

    why_not_ready: str = "the model is loading"
    has_engine: bool = False
    is_draining: bool = False
    failure: TargetFailedError | None = None
    adapter_ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What a front end needs to serve.

    prefix: see EngineClient. row, num_rows: its part of the shared counters, and of how many.
    """

    routed: RoutedModel
    prefix: str
    row: int = 0
    num_rows: int = 1
