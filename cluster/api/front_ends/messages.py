"""Messages between a Router and its front ends: a kind, and what belongs to it.

From the Router: `start` (Start); `state` (RouterState); `step` (outputs, and ids of requests that
have left the queue); `settled` (id, and why it was refused, or None); `expired` (ids); `failed`
(error of all streams); `abort` (AbortOrder); `item` and `ended` (call, result or error); `stop`.

From a front end: `listening`; `submit` (number, EngineRequest, Caller, is_silent); `withdraw`
(id); `sample` (see SampleBuffer.add); `counts` (Counts, open streams); `call` (call, method,
argument), `next` and `cancel` (call).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.api.base.authentication import ApiKey
from cluster.replica.router import RoutedModel
from specdec.types.errors import TargetFailedError

RECEIPT_MODEL = "receipt_model"
"""A method that every Router has: yields its ReceiptModel. Reading the weights takes minutes."""


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
    """Settings with which a front end serves.

    prefix: see EngineClient. row, num_rows: its part of the shared counters, and of how many. keys,
    admin_token: those that the Router has read.
    """

    routed: RoutedModel
    prefix: str
    keys: tuple[ApiKey, ...] = ()
    admin_token: str | None = field(default=None, repr=False)
    row: int = 0
    num_rows: int = 1
