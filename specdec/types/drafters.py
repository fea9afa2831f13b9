"""Versions of a draft head, which a running engine can change between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.validation import check_types, require_range

CONFIGURED_VERSION = 1
"""The version that the ranks load when they start."""

MAX_LOADED_VERSIONS = 3
"""Versions in the memory of the ranks: the active one, the one before it, and one that is loaded.
"""

MAX_DRAFTER_PATH = 1024
MAX_VERSION = 2**31 - 1


class VersionState(StrEnum):
    """State of a version of a head on one engine."""

    LOADING = "loading"
    ACTIVE = "active"
    READY = "ready"
    """Was active, and can be again."""
    ROLLED_BACK = "rolled_back"
    """Was replaced by the version before it, because fewer of its drafts were accepted."""
    FAILED = "failed"
    """Could not be loaded, or the target was lost with it."""


@dataclass(frozen=True)
class HeadFile:
    """A draft head for the ranks of a target to load.

    name: a directory or a Hub id, as for a head in `speculative_config`. directory: its directory
    on the engine's node; ranks without it resolve the name.
    """

    version: int
    name: str
    directory: str


@dataclass(frozen=True)
class DrafterVersion:
    """A version of the head on one engine, with the drafts of it that were verified.

    name: as in HeadFile. num_accepted_first: drafts whose first token was accepted. fault: why it
    failed; else empty.
    """

    number: int
    name: str
    state: VersionState
    speculation: SpeculationStats
    num_accepted_first: int
    fault: str = ""

    @property
    def acceptance(self) -> float | None:
        """Share of the first draft tokens that were accepted; None without a draft."""
        num_drafts = self.speculation.num_drafts
        return self.num_accepted_first / num_drafts if num_drafts else None


@dataclass(frozen=True)
class DrafterReport:
    """The versions of a replica's head, oldest first.

    is_pinned: whether no version is rolled back automatically. fault: why the replica did not
    execute an order; else empty.
    """

    replica_id: str
    versions: tuple[DrafterVersion, ...] = ()
    is_pinned: bool = False
    num_rollbacks: int = 0
    fault: str = ""


@dataclass(frozen=True)
class DrafterOrder:
    """Change of the version in use, between two steps on all ranks.

    path: a directory or Hub id of a head to load as a new version; empty for none. version: an
    existing one to use again; 0 for none. is_pinned: whether versions are then rolled back by
    orders only; None leaves it as it is. replica_id: empty for all replicas.

    Raises InvalidValueError. An order without a change is a question for the versions.
    """

    path: str = ""
    version: int = 0
    is_pinned: bool | None = None
    replica_id: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        require_range("version", self.version, 0, MAX_VERSION)
        if self.path and self.version:
            raise InvalidValueError("version", self.version, "left out where a path is given")
        if len(self.path) > MAX_DRAFTER_PATH or not self.path.isprintable():
            limit = f"at most {MAX_DRAFTER_PATH} printable characters"
            raise InvalidValueError("path", self.path, limit)

    def with_change(self) -> Self:
        """Return the order. Raises InvalidValueError where it changes nothing."""
        if not self.has_change:
            raise InvalidValueError("path", "", "given, or version or is_pinned")
        return self

    @property
    def has_change(self) -> bool:
        """Return whether the order changes anything."""
        return bool(self.path or self.version) or self.is_pinned is not None
