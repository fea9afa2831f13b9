"""Orders to load and unload adapters of an engine: files are checked, then ranks load them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from specdec.config.engine import AdapterLimits
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineThread
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.models.model_limits import require_draft_adapters
from specdec.models.lora.peft import AdapterFiles
from specdec.models.resolve import log_progress, portable_name, resolve_adapter
from specdec.types.adapters import AdapterOrder, AdapterReport, AdapterSource, LoRARequest
from specdec.types.errors import (
    InvalidValueError,
    NotReadyError,
    UnknownModelError,
    UnsupportedModelError,
)

T = TypeVar("T")

LOAD_TIMEOUT_S = 120.0
"""Wait for the ranks of a target to load an adapter, which can include a download."""

_POLL_S = 0.01


def require_adapters(adapters: T | None) -> T:
    """Return what an engine has for adapters. Raises InvalidValueError where none can be loaded."""
    if adapters is None:
        limit = "True for adapters to be loaded; start the service with --enable-lora"
        raise InvalidValueError("enable_lora", False, limit)
    return adapters


@dataclass(frozen=True)
class _Checked:
    """An adapter whose files were read. rank: its largest. draft: its counterpart, if any."""

    target: AdapterSource | None
    rank: int
    draft: AdapterSource | None

    @property
    def sources(self) -> tuple[str, str]:
        """See `Adapters.sources_of`."""
        target, draft = (each.source if each else "" for each in (self.target, self.draft))
        return target, draft


class AdapterControl:
    """Executes orders for the adapters of an engine, on an event loop."""

    def __init__(
        self,
        engine: Engine,
        adapters: Adapters,
        limits: AdapterLimits,
        base_model: str,
        draft_fault: str = "",
        clock: Callable[[], float] = time.monotonic,
        layers: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """adapters: those of the engine. base_model: its name, which no adapter may have.

        draft_fault: why no counterpart can be loaded; empty where the drafter takes some.
        layers: shapes of the linear layers of the target; None where only its ranks know them.
        """
        self._engine = engine
        self._adapters = adapters
        self._limits = limits
        self._base_model = base_model
        self._draft_fault = draft_fault
        self._clock = clock
        self._layers = layers
        self._lock = asyncio.Lock()  # of the event loop below
        self._lock_loop: asyncio.AbstractEventLoop | None = None

    async def execute(
        self, order: AdapterOrder, thread: EngineThread, replica_id: str
    ) -> AdapterReport:
        """Execute an order; return when requests may use the adapter, or no longer.

        thread: the engine's. Raises InvalidValueError for a name that an adapter from another
        source has and where no more adapters fit, UnknownModelError for an unknown name,
        ModelNotFoundError and UnsupportedModelError for files that cannot be used, and
        NotReadyError while the ranks still load after LOAD_TIMEOUT_S.
        """
        if order.loads:
            await self._load(order, await asyncio.to_thread(self._checked, order), thread)
        elif order.name:
            await thread.call(lambda: self._unload(order.name))
        return AdapterReport(replica_id, await thread.call(self._engine.adapter_infos))

    @asynccontextmanager
    async def holding(self, lora: LoRARequest, thread: EngineThread) -> AsyncGenerator[int]:
        """Hold an adapter, which is loaded if it is not; yield its id.

        In place of an idle one where no more fit; waits while all are held or have requests.
        Without a path it must be loaded. Raises as `execute` does.
        """
        lora = await asyncio.to_thread(_portable, lora)
        held: list[int] = []  # added on the engine's thread: the caller may be cancelled meanwhile
        try:
            if not await thread.call(lambda: self._hold(lora, held)):
                async with self._one_at_a_time(thread.event_loop):
                    await self._load_and_hold(lora, held, thread)
            yield held[0]
        finally:
            thread.post(lambda: self._let_go(held))

    async def _load_and_hold(
        self, lora: LoRARequest, held: list[int], thread: EngineThread
    ) -> None:
        """Hold an adapter, once it is loaded and there was room for it; one call at a time.

        No other one makes room for files that cannot be used.
        """
        order = AdapterOrder.of(lora)
        checked: _Checked | None = None
        while not await thread.call(lambda: self._hold(lora, held)):
            if checked is None:
                checked = await asyncio.to_thread(self._checked, order)
            if await thread.call(lambda: self._is_ordered(lora) or self._make_room()):
                await self._load(order, checked, thread)
            else:
                await asyncio.sleep(_POLL_S)

    def _one_at_a_time(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """Return the lock of an event loop; streams are read on one at a time."""
        if self._lock_loop is not loop:
            self._lock, self._lock_loop = asyncio.Lock(), loop
        return self._lock

    def load_all(self, orders: Sequence[AdapterOrder]) -> None:
        """Load adapters before the engine's thread has started. Raises as `execute` does."""
        for order in orders:
            self._load_now(order)

    def _load_now(self, order: AdapterOrder) -> None:
        adapter_id = self._order_load(order, self._checked(order))
        assert adapter_id is not None, "these orders are executed one by one"
        ends_at_s = self._clock() + LOAD_TIMEOUT_S
        while (fault := self._fault_of(adapter_id)) is None:
            self._require_time(order.name, ends_at_s)
            time.sleep(_POLL_S)
        _require_loaded(order.name, fault)

    async def _load(self, order: AdapterOrder, checked: _Checked, thread: EngineThread) -> None:
        """Load an adapter, and wait until it is named."""
        ends_at_s = self._clock() + LOAD_TIMEOUT_S
        while (adapter_id := await thread.call(lambda: self._order_load(order, checked))) is None:
            self._require_time(order.name, ends_at_s)
            await asyncio.sleep(_POLL_S)
        while (fault := await thread.call(partial(self._fault_of, adapter_id))) is None:
            self._require_time(order.name, ends_at_s)
            await asyncio.sleep(_POLL_S)
        _require_loaded(order.name, fault)

    def _checked(self, order: AdapterOrder) -> _Checked:
        """Find and read the files of an adapter, and of its counterpart."""
        if order.name == self._base_model:
            raise InvalidValueError("lora_name", order.name, "different from the model's name")
        require_draft_adapters(order.draft_path, self._draft_fault)
        target = self._found(order.path, self._layers) if order.path else None
        draft = self._found(order.draft_path) if order.draft_path else None
        rank = (target or draft or (None, 0))[1]
        return _Checked(target and target[0], rank, draft and draft[0])

    def _found(
        self, path: str, layers: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[AdapterSource, int]:
        """Return an adapter of these layers, with its source in any directory, and its rank."""
        source = portable_name(path)
        directory = resolve_adapter(source, log_progress)
        files = AdapterFiles.read(directory, self._limits.max_rank)
        if layers is not None:
            files.require_modules(layers)
        return AdapterSource(source, str(directory)), files.rank

    # These are called on the engine's thread, or before there is one.

    def _order_load(self, order: AdapterOrder, checked: _Checked) -> int | None:
        """Order an adapter; return its id, or None while an order for the same one is executed.

        One that is named already and has the same sources is returned as it is, so that an order
        can be repeated that only some replicas have executed.
        """
        self._engine.advance_adapters()  # frees the places of those that were unloaded
        if not order.replaces and self._adapters.sources_of(order.name) == checked.sources:
            return self._adapters.ids[order.name]
        if not order.replaces and self._adapters.is_ordered(order.name, checked.sources):
            return None
        return self._adapters.load(
            order.name, checked.target, checked.rank, replaces=order.replaces, draft=checked.draft
        )

    def _unload(self, name: str) -> None:
        self._adapters.unload(name)
        self._engine.advance_adapters()

    def _fault_of(self, adapter_id: int) -> str | None:
        """Return why an adapter is not loaded; empty if it is; None while the ranks load it."""
        self._engine.advance_adapters()
        return self._adapters.fault_of(adapter_id)

    def _hold(self, lora: LoRARequest, held: list[int]) -> bool:
        """Hold a named adapter and add its id to `held`; return whether it is loaded.

        Raises UnknownModelError if it is not and has no path, and InvalidValueError where an
        adapter of this name comes from another source.
        """
        name, present = lora.lora_name, self._adapters.sources_of(lora.lora_name)
        if present is None:
            if not lora.has_paths:
                raise UnknownModelError(name, *self._adapters.ids)
            return False
        if lora.has_paths and (lora.lora_path, lora.draft_lora_path) != present:
            given = " and ".join(filter(None, (lora.lora_path, lora.draft_lora_path)))
            limit = f"{' and '.join(filter(None, present))}, which {name} was loaded from"
            raise InvalidValueError("lora_path", given, limit)
        held.append(self._adapters.hold(name))
        return True

    def _let_go(self, held: Sequence[int]) -> None:
        for adapter_id in held:
            self._adapters.let_go(adapter_id)
        self._engine.advance_adapters()

    def _is_ordered(self, lora: LoRARequest) -> bool:
        """Return whether an order to load this adapter is executed, which has room for it."""
        sources = lora.lora_path, lora.draft_lora_path
        return self._adapters.is_ordered(lora.lora_name, sources)

    def _make_room(self) -> bool:
        """Return whether another adapter fits, at worst in place of an idle one."""
        self._engine.make_room_for_adapter()
        return self._adapters.has_room

    def _require_time(self, name: str, ends_at_s: float) -> None:
        if self._clock() >= ends_at_s:
            text = f"adapter {name} is still loading"
            raise NotReadyError(f"{text}; see `specdec lora list`")


def _require_loaded(name: str, fault: str) -> None:
    if fault:
        raise UnsupportedModelError(f"adapter {name} cannot be loaded: {fault}")


def _portable(lora: LoRARequest) -> LoRARequest:
    """Return a request for an adapter with its sources in any working directory."""
    paths = (lora.lora_path, lora.draft_lora_path)
    path, draft_path = (each and portable_name(each) for each in paths)
    return replace(lora, lora_path=path, draft_lora_path=draft_path)
