"""What operators say and are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from specdec.errors import InvalidValueError
from specdec.speculation import SpeculationControl, SpeculationMode
from specdec.stats import SpeculationStats

MAX_UPDATED_BY_CHARS = 128
MAX_REASON_CHARS = 256


@dataclass(frozen=True)
class SpeculationChange:
    """A change of what is wanted of speculation. What is None stays as it is.

    reset: first takes back all that operators have set. expected_version: the version that the
    change was made for; None changes whatever there is. updated_by, reason: who and why.
    """

    mode: SpeculationMode | None = None
    threshold: int | None = None
    num_speculative_tokens: int | None = None
    reset: bool = False
    expected_version: int | None = None
    updated_by: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        self.applied_to(SpeculationControl("auto", threshold=0, num_speculative_tokens=0))
        if not self.values and not self.reset:
            limit = "one of mode, threshold, num_speculative_tokens and reset, or several"
            raise InvalidValueError("change", {}, limit)
        _require_line("updated_by", self.updated_by, MAX_UPDATED_BY_CHARS)
        _require_line("reason", self.reason, MAX_REASON_CHARS)

    @property
    def values(self) -> dict[str, str | int]:
        """What is set, by name."""
        values = {
            "mode": self.mode,
            "threshold": self.threshold,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}

    def applied_to(self, control: SpeculationControl) -> SpeculationControl:
        """`control` with what is set here instead of its own. Raises InvalidValueError."""
        return SpeculationControl(
            mode=control.mode if self.mode is None else self.mode,
            threshold=control.threshold if self.threshold is None else self.threshold,
            num_speculative_tokens=control.num_speculative_tokens
            if self.num_speculative_tokens is None
            else self.num_speculative_tokens,
        )


@dataclass(frozen=True)
class SpeculationState:
    """What is wanted of speculation, and who wanted it.

    in_force: an operator's value where there is one, else the configured one.
    overridden: names of the values that an operator has set.
    version: counts the changes, 0 where none was made; then updated_at is None.
    """

    in_force: SpeculationControl
    configured: SpeculationControl
    overridden: tuple[str, ...]
    version: int
    updated_at: datetime | None
    updated_by: str
    reason: str


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself.

    reason: why it is not ready; empty where it is. num_decoding: what the threshold is compared
    with. kv_cache_usage: share of the blocks taken, 0 to 1. is_speculation_on: whether a request
    that says nothing about it gets drafts now. speculation_version: of the state that it goes by;
    None before it has heard of one. The other counts are since it started.
    """

    replica_id: str
    is_ready: bool
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_decoding: int = 0
    kv_cache_usage: float = 0.0
    is_speculation_on: bool = False
    speculation_version: int | None = None
    num_generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica as it last reported, `age_s` seconds ago."""

    report: ReplicaReport
    uptime_s: float
    age_s: float


@dataclass(frozen=True)
class ServiceStatus:
    """How the service runs.

    replicas: those heard of lately, the longest-running first. num_lost_replicas: those that failed
    or fell silent since the control plane started.
    """

    replicas: tuple[ReplicaStatus, ...]
    speculation: SpeculationState
    num_lost_replicas: int


def _require_line(name: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars or not text.isprintable():
        raise InvalidValueError(name, text, f"at most {max_chars} printable characters")
