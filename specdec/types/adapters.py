"""LoRA adapters of a served model: orders to load and unload them, and what is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.validation import check_types, require_range

MAX_ADAPTER_NAME = 256
MAX_ADAPTER_PATH = 1024

_NAME_LIMIT = (
    f"1 to {MAX_ADAPTER_NAME} letters, digits and characters of _ . : / @ + -, the first a letter, "
    "a digit or _"
)
_NAME = re.compile(r"\w[\w.:/@+-]*", re.ASCII)


def check_adapter_name(field_name: str, name: str) -> None:
    """Raise InvalidValueError for a name that no adapter can have."""
    if len(name) > MAX_ADAPTER_NAME or not _NAME.fullmatch(name):
        raise InvalidValueError(field_name, name, _NAME_LIMIT)


def check_adapter_path(field_name: str, path: str) -> None:
    """Raise InvalidValueError for a path or Hub id that is empty, too long or not printable."""
    if not path or len(path) > MAX_ADAPTER_PATH or not path.isprintable():
        raise InvalidValueError(field_name, path, f"1 to {MAX_ADAPTER_PATH} printable characters")


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for requests of an `LLM`, under vLLM's names.

    lora_name: identifies it. lora_int_id: at least 1; no other adapter may have the same, as in
    vLLM. lora_path: a directory in PEFT's layout, or a Hub id. draft_lora_path: likewise, of its
    counterpart for the draft model or head; empty for none. Without lora_path it drafts for the
    model itself. Both are empty for an adapter that is loaded.

    Raises InvalidValueError.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    draft_lora_path: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        check_adapter_name("lora_name", self.lora_name)
        require_range("lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        if self.lora_path:
            check_adapter_path("lora_path", self.lora_path)
        if self.draft_lora_path:
            check_adapter_path("draft_lora_path", self.draft_lora_path)

    @property
    def has_paths(self) -> bool:
        """Return whether it can be loaded."""
        return bool(self.lora_path or self.draft_lora_path)


class AdapterState(StrEnum):
    """State of an adapter on one engine."""

    LOADING = "loading"
    """The ranks read it; after a restart of the target its requests wait for that."""
    READY = "ready"
    UNLOADING = "unloading"
    """New requests are refused; the running ones complete with it."""


@dataclass(frozen=True)
class AdapterSource:
    """An adapter in PEFT's layout.

    source: a directory or a Hub id. directory: its directory on the engine's node; ranks without it
    resolve the source.
    """

    source: str
    directory: str


@dataclass(frozen=True)
class AdapterFile:
    """An adapter for the ranks of a model to load.

    adapter_id: as in StepRow; no other adapter of the engine ever has it. source, directory: as in
    AdapterSource; empty where the model itself runs. draft_source, draft_directory: likewise, of
    its counterpart for the model's draft head; empty for none. is_reloaded: whether the ranks of a
    target that was replaced had it; the version that its counterpart is for may be loaded later.
    """

    adapter_id: int
    name: str
    source: str
    directory: str
    draft_source: str = ""
    draft_directory: str = ""
    is_reloaded: bool = False


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter on one engine.

    source: as in AdapterFile. rank: the largest of its modules. num_requests: choices of requests
    that have not ended. speculation: drafts that were verified with it. draft_source: of its
    counterpart for the draft model or head; empty for none.
    """

    name: str
    source: str
    rank: int
    state: AdapterState
    num_requests: int = 0
    num_generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    draft_source: str = ""


@dataclass(frozen=True)
class AdapterReport:
    """The adapters of a replica, in the order in which they were loaded.

    fault: why the replica did not execute an order; else empty.
    """

    replica_id: str
    adapters: tuple[AdapterInfo, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class AdapterOrder:
    """Load or unload an adapter; without a name it is a question for the adapters.

    path: a directory in PEFT's layout or a Hub id to load. replaces: whether an adapter of that
    name is replaced; its running requests complete with the old one. replica_id: empty for all
    replicas. draft_path: like path, of the counterpart with which the draft model or head drafts
    for the adapter's requests; empty for the drafter as it is. With draft_path alone the model
    itself answers them; with neither path the adapter is unloaded.

    Raises InvalidValueError.
    """

    name: str = ""
    path: str = ""
    replaces: bool = False
    replica_id: str = ""
    draft_path: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if self.name:
            check_adapter_name("name", self.name)
        if self.path:
            check_adapter_path("path", self.path)
        if self.draft_path:
            check_adapter_path("draft_path", self.draft_path)
        if (self.loads or self.replaces) and not self.name:
            raise InvalidValueError("name", "", "given with a path")
        if self.replaces and not self.loads:
            raise InvalidValueError("path", "", "given where an adapter is replaced")

    @property
    def loads(self) -> bool:
        """Return whether it loads an adapter."""
        return bool(self.path or self.draft_path)

    @classmethod
    def load(cls, name: str, path: str = "", *, draft_path: str = "", **more: Any) -> Self:
        """Return an order to load an adapter. Raises InvalidValueError without name or paths."""
        check_adapter_name("name", name)
        if not path and not draft_path:
            raise InvalidValueError(
                "path", path, "a directory or Hub id, unless draft_path is given"
            )
        return cls(name=name, path=path, draft_path=draft_path, **more)

    @classmethod
    def of(cls, lora: LoRARequest) -> Self:
        """Return the order to load an adapter. Raises InvalidValueError without a path."""
        return cls.load(lora.lora_name, lora.lora_path, draft_path=lora.draft_lora_path)

    @classmethod
    def unload(cls, name: str, **more: Any) -> Self:
        """Return an order to unload an adapter. Raises InvalidValueError without a name."""
        check_adapter_name("name", name)
        return cls(name=name, **more)
