"""The LoRA adapters of an engine: which are loaded on the ranks, and which requests may use them.

An adapter is *named* from the moment at which every rank has it until it is unloaded or replaced;
only then is a new request accepted for it. Its id in steps and in the keys of the prefix cache is
never used again, so KV is not shared between two adapters that had the same name. An unloaded
adapter stays on the ranks until its last request has ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from specdec.types.adapters import AdapterFile, AdapterInfo, AdapterState
from specdec.types.errors import InvalidValueError, UnknownModelError
from specdec.types.messages import BASE_MODEL, AdapterTarget
from specdec.types.stats import Counts, SpeculationStats

logger = logging.getLogger(__name__)

MAX_COUNTED_NAMES = 64
"""Names of adapters in the metrics; those that come later are counted together."""

OTHER_ADAPTERS = "other"


@dataclass(eq=False)
class _Adapter:
    """An adapter. is_loaded: whether all ranks have it. is_retired: whether it lost its name."""

    file: AdapterFile
    rank: int
    is_loaded: bool = False
    is_retired: bool = False
    num_generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def adapter_id(self) -> int:
        return self.file.adapter_id

    @property
    def state(self) -> AdapterState:
        if self.is_retired:
            return AdapterState.UNLOADING
        return AdapterState.READY if self.is_loaded else AdapterState.LOADING

    def info(self, num_requests: int) -> AdapterInfo:
        return AdapterInfo(
            self.file.name,
            self.file.source,
            self.rank,
            self.state,
            num_requests,
            self.num_generated_tokens,
            self.speculation,
        )


class Adapters:
    """Adapters of one engine. The engine's thread alone uses it, except for `ids`.

    ids: by name, of the adapters that new requests may use; replaced as a whole at each change, so
    that any thread may read it.
    """

    def __init__(self, max_loaded: int) -> None:
        """max_loaded: adapters that the ranks hold at most, those being unloaded included."""
        self.ids: Mapping[str, int] = {}
        self._max_loaded = max_loaded
        self._adapters: dict[int, _Adapter] = {}  # by id, oldest first
        self._last_used: dict[int, None] = {}  # ids, least recently used first
        self._held: Counter[int] = Counter()  # by id
        self._loading: int | None = None  # on the ranks at this moment
        self._faults: dict[int, str] = {}  # of loads that failed and were not asked for yet
        self._next_id = BASE_MODEL + 1
        self._counted: dict[str, tuple[int, SpeculationStats]] = {}

    def load(self, name: str, source: str, directory: str, rank: int, *, replaces: bool) -> int:
        """Order an adapter, which is named as soon as all ranks have it; return its id.

        Raises InvalidValueError for a name that is taken, unless it `replaces` that adapter, and
        where no more adapters fit.
        """
        present = (each for each in self._adapters.values() if not each.is_retired)
        if not replaces and any(each.file.name == name for each in present):
            raise InvalidValueError("lora_name", name, "a name that no loaded adapter has")
        if not self.has_room:
            limit = f"at most {self._max_loaded} (max_cpu_loras); unload one first"
            raise InvalidValueError("loaded adapters", len(self._adapters) + 1, limit)
        adapter_id, self._next_id = self._next_id, self._next_id + 1
        file = AdapterFile(adapter_id, name, source, directory)
        self._adapters[adapter_id] = _Adapter(file, rank)
        return adapter_id

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; free it when its last request has ended.

        Raises UnknownModelError.
        """
        if name not in self.ids:
            raise UnknownModelError(name, *self.ids)
        self._retire(self.ids[name])

    @property
    def has_room(self) -> bool:
        """Return whether another adapter can be loaded."""
        return len(self._adapters) < self._max_loaded

    def make_room(self, used: Collection[int]) -> None:
        """Unload the least recently used idle adapter where no other one fits."""
        idle = (each for each in self._last_used if each not in used and not self._held[each])
        if not self.has_room and (oldest := next(idle, None)) is not None:
            self._retire(oldest)

    def source_of(self, name: str) -> str | None:
        """Return what a named adapter was loaded from; None for an unknown name."""
        adapter_id = self.ids.get(name)
        return None if adapter_id is None else self._adapters[adapter_id].file.source

    def hold(self, name: str) -> int:
        """Keep a named adapter on the ranks until `let_go`; return its id."""
        adapter_id = self.ids[name]
        self._held[adapter_id] += 1
        return adapter_id

    def let_go(self, adapter_id: int) -> None:
        """End one `hold`."""
        self._held[adapter_id] -= 1
        if not self._held[adapter_id]:
            del self._held[adapter_id]

    def fault_of(self, adapter_id: int) -> str | None:
        """Return why an ordered load failed, once; empty if it has not; None while it goes on."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None and not adapter.is_loaded:
            return None
        return self._faults.pop(adapter_id, "")

    def use(self, adapter_id: int, name: str) -> int:
        """Record a new request; return the id of its adapter.

        name: by which the request has selected it. If the adapter was replaced since then, it is
        the one that has the name now. Raises UnknownModelError where none has.
        """
        if adapter_id not in self.ids.values():
            if name not in self.ids:
                raise UnknownModelError(name, *self.ids)
            adapter_id = self.ids[name]
        self._last_used.pop(adapter_id, None)
        self._last_used[adapter_id] = None
        return adapter_id

    def is_ready(self, adapter_id: int) -> bool:
        """Return whether the ranks have the adapter, so that steps may name it."""
        adapter = self._adapters.get(adapter_id)
        return adapter is not None and adapter.is_loaded

    @property
    def is_loading(self) -> bool:
        """Return whether the ranks do not have some adapter yet."""
        return not all(each.is_loaded for each in self._adapters.values())

    @property
    def is_settled(self) -> bool:
        """Return whether `advance` has nothing to do, whatever requests there are."""
        return not self.is_loading and not any(e.is_retired for e in self._adapters.values())

    def advance(self, target: AdapterTarget, used: Collection[int]) -> list[int]:
        """Load and free adapters on the ranks, as far as possible without waiting.

        used: ids with requests that have not ended. Returns the id of one that could not be loaded,
        whose requests cannot go on, before the next one is begun: that may find the target lost.
        Called between two steps.
        """
        self._free(target, used)
        while (adapter := self._next_to_load()) is not None:
            if self._loading is None:
                self._loading = adapter.adapter_id
                target.begin_adapter_load(adapter.file)
            fault = target.collect_adapter_load()
            if fault is None:
                break
            self._loading = None
            if fault:
                target.unload_adapter(adapter.adapter_id)  # other ranks may have it
                self._fail(adapter, fault)
                return [adapter.adapter_id]
            self._activate(adapter)
        return []

    def restart(self) -> None:
        """Follow the replacement of the target, whose ranks have no adapters: load all again."""
        self._loading = None
        for adapter in self._adapters.values():
            adapter.is_loaded = False

    def record(self, adapter_id: int, num_tokens: int, drafted: int, accepted: int) -> None:
        """Count the tokens that a step has added to a sequence, and its verified draft."""
        adapter = self._adapters[adapter_id]
        adapter.num_generated_tokens += num_tokens
        adapter.speculation = adapter.speculation.after_draft(drafted, accepted)
        name = adapter.file.name
        if name not in self._counted and len(self._counted) >= MAX_COUNTED_NAMES:
            name = OTHER_ADAPTERS
        tokens, speculation = self._counted.get(name, (0, SpeculationStats()))
        self._counted[name] = tokens + num_tokens, speculation.after_draft(drafted, accepted)

    def add_to(self, counts: Counts) -> None:
        """Fill in the fields about adapters."""
        counts.tokens_by_adapter = {name: tokens for name, (tokens, _) in self._counted.items()}
        counts.drafts_by_adapter = {name: drafts for name, (_, drafts) in self._counted.items()}

    def snapshot(self, used: Iterable[int]) -> tuple[AdapterInfo, ...]:
        """Return all adapters, oldest first. used: the id of each choice that has not ended."""
        num_requests: dict[int, int] = {}
        for adapter_id in used:
            num_requests[adapter_id] = num_requests.get(adapter_id, 0) + 1
        return tuple(
            each.info(num_requests.get(each.adapter_id, 0)) for each in self._adapters.values()
        )

    def _free(self, target: AdapterTarget, used: Collection[int]) -> None:
        """Have the ranks drop the adapters that have neither a name nor requests."""
        for adapter_id, adapter in list(self._adapters.items()):
            is_used = adapter_id in used or self._held[adapter_id] > 0
            if adapter.is_retired and not is_used and adapter_id != self._loading:
                del self._adapters[adapter_id]
                if adapter.is_loaded:
                    target.unload_adapter(adapter_id)
                logger.info("adapter %s is unloaded", adapter.file.name)

    def _next_to_load(self) -> _Adapter | None:
        if self._loading is not None:
            return self._adapters[self._loading]
        return next((each for each in self._adapters.values() if not each.is_loaded), None)

    def _activate(self, adapter: _Adapter) -> None:
        """Name an adapter that all ranks have, in place of another one of its name."""
        adapter_id, name = adapter.adapter_id, adapter.file.name
        adapter.is_loaded = True
        logger.info("adapter %s is loaded from %s", name, adapter.file.source)
        if adapter.is_retired or self.ids.get(name) == adapter_id:
            return  # the target had to load it again
        replaced = self.ids.get(name)
        self.ids = {**self.ids, name: adapter_id}  # first: at no moment the name is unknown
        self._last_used[adapter_id] = None
        if replaced is not None:
            self._retire(replaced)

    def _retire(self, adapter_id: int) -> None:
        self._adapters[adapter_id].is_retired = True
        self.ids = {name: each for name, each in self.ids.items() if each != adapter_id}
        self._last_used.pop(adapter_id, None)

    def _fail(self, adapter: _Adapter, fault: str) -> None:
        adapter_id, name = adapter.adapter_id, adapter.file.name
        logger.warning("adapter %s cannot be loaded: %s", name, fault)
        is_ordered = not adapter.is_retired and self.ids.get(name) != adapter_id
        self._retire(adapter_id)
        del self._adapters[adapter_id]
        if is_ordered:
            self._faults[adapter_id] = fault
