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
from dataclasses import dataclass, field, replace

from specdec.speculation.proposers.draft_adapters import AdapterDrafter
from specdec.types.adapters import AdapterFile, AdapterInfo, AdapterSource, AdapterState
from specdec.types.errors import InvalidValueError, UnknownModelError
from specdec.types.messages import BASE_MODEL
from specdec.types.ranks import AdapterTarget
from specdec.types.reports.stats import Counts, SpeculationStats

logger = logging.getLogger(__name__)

MAX_COUNTED_NAMES = 64
"""Names of adapters in the metrics; those that come later are counted together."""

OTHER_ADAPTERS = "other"
_UNUSED = 0, SpeculationStats()
_MAX_FAULTS = 1024  # kept until their callers ask for them: these may have left

NO_SOURCE = AdapterSource("", "")


@dataclass(eq=False)
class _Adapter:
    """An adapter.

    draft: its counterpart for a draft model. is_loaded: whether all ranks of the target have it.
    is_retired: whether it lost its name. has_counterpart: whether the ranks load that of their head
    with it; not once this has failed after a restart.
    """

    file: AdapterFile
    draft: AdapterFile | None
    rank: int
    is_loaded: bool = False
    is_retired: bool = False
    has_counterpart: bool = True
    num_generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def adapter_id(self) -> int:
        return self.file.adapter_id

    @property
    def draft_source(self) -> str:
        return self.file.draft_source if self.draft is None else self.draft.source

    @property
    def sources(self) -> tuple[str, str]:
        """Sources of it and of its counterpart; empty for a part that it does not have."""
        return self.file.source, self.draft_source

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
            self.draft_source,
        )


class Adapters:
    """Adapters of one engine. The engine's thread alone uses it, except for `ids` and `names`.

    ids: by name, of the adapters that new requests may use; replaced as a whole at each change, so
    that any thread may read it.
    """

    def __init__(self, max_loaded: int, drafter: AdapterDrafter | None = None) -> None:
        """max_loaded: adapters that the ranks hold at most, those being unloaded included.

        drafter: loads the counterparts of adapters; None where no draft model can: the ranks of the
        target then load them for its head.
        """
        self.ids: Mapping[str, int] = {}
        self.drafter = drafter
        self._max_loaded = max_loaded
        self._adapters: dict[int, _Adapter] = {}  # by id, oldest first
        self._last_used: dict[int, None] = {}  # ids, least recently used first
        self._held: Counter[int] = Counter()  # by id
        self._loading: int | None = None  # on the ranks at this moment
        self._faults: dict[int, str] = {}  # of loads that failed and were not asked for yet
        self._last_dropped = BASE_MODEL  # the largest id of a fault that is not kept
        self._next_id = BASE_MODEL + 1
        self._counted: dict[str, tuple[int, SpeculationStats]] = {}
        self._unused: dict[str, None] = {}  # counted names without tokens, oldest first

    def load(
        self,
        name: str,
        target: AdapterSource | None,
        rank: int,
        *,
        replaces: bool,
        draft: AdapterSource | None = None,
    ) -> int:
        """Order an adapter, which is named as soon as all ranks have it; return its id.

        target: None where the model itself runs. draft: its counterpart. Raises InvalidValueError
        for a name that is taken, unless it `replaces` that adapter, and where no more adapters fit.
        """
        present = (each for each in self._adapters.values() if not each.is_retired)
        if not replaces and any(each.file.name == name for each in present):
            raise InvalidValueError("lora_name", name, "a name that no loaded adapter has")
        if not self.has_room:
            limit = f"at most {self._max_loaded} (max_cpu_loras); unload one first"
            raise InvalidValueError("loaded adapters", len(self._adapters) + 1, limit)
        adapter_id, self._next_id = self._next_id, self._next_id + 1
        own, part = target or NO_SOURCE, draft or NO_SOURCE
        file, counterpart = AdapterFile(adapter_id, name, own.source, own.directory), None
        if self.drafter is None:
            file = replace(file, draft_source=part.source, draft_directory=part.directory)
        elif draft is not None:
            counterpart = replace(file, **vars(draft))
        self._adapters[adapter_id] = _Adapter(file, counterpart, rank)
        return adapter_id

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; free it when its last request has ended.

        Raises UnknownModelError.
        """
        if name not in self.ids:
            raise UnknownModelError(name, *self.ids)
        self._retire(self.ids[name])

    def names(self) -> frozenset[str]:
        """Return the names of the adapters that are loaded or ordered. Thread-safe."""
        present = (each for each in tuple(self._adapters.values()) if not each.is_retired)
        return frozenset(each.file.name for each in present)

    @property
    def has_room(self) -> bool:
        """Return whether another adapter can be loaded."""
        return len(self._adapters) < self._max_loaded

    def make_room(self, used: Collection[int]) -> None:
        """Unload the least recently used idle adapter where no other one fits."""
        idle = (each for each in self._last_used if each not in used and not self._held[each])
        if not self.has_room and (oldest := next(idle, None)) is not None:
            self._retire(oldest)

    def sources_of(self, name: str) -> tuple[str, str] | None:
        """Return what a named adapter and its counterpart were loaded from; None for no adapter.

        Empty for a counterpart that it does not have.
        """
        adapter_id = self.ids.get(name)
        if adapter_id is None:
            return None
        return self._adapters[adapter_id].sources

    def is_ordered(self, name: str, sources: tuple[str, str]) -> bool:
        """Return whether the ranks are to load an adapter from these `sources` for a name."""
        ordered = filter(self._is_new, self._adapters.values())
        return any((each.file.name, each.sources) == (name, sources) for each in ordered)

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
        if (adapter := self._adapters.get(adapter_id)) is not None:
            return "" if adapter.is_loaded else None
        unknown = "its result is no longer known" if adapter_id <= self._last_dropped else ""
        return self._faults.pop(adapter_id, unknown)

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
            fault = self._load_on_draft(adapter)
            if fault == "":
                fault = self._load_on(target, adapter)
            if fault is None:
                break
            if fault and self._leaves_out_counterpart(adapter, fault):
                continue
            if fault:
                self._fail(adapter, fault)
                return [adapter.adapter_id]
            self._activate(adapter)
            self._free(target, used)  # the one that it has replaced
        return []

    def _load_on_draft(self, adapter: _Adapter) -> str | None:
        """Load the counterpart of a new adapter; return as `collect_adapter_load` does.

        The draft model has it when the first request runs. Where it has to be loaded again, as by a
        worker that restarts while the target loads, nothing waits: the draft model drafts without.
        """
        is_first = self._loading is None and self._is_new(adapter)
        if adapter.draft is None or self.drafter is None or not is_first:
            return ""
        self.drafter.load_adapter(adapter.draft)
        fault = self.drafter.adapter_fault(adapter.adapter_id)
        return f"draft model: {fault}" if fault else fault

    def _load_on(self, target: AdapterTarget, adapter: _Adapter) -> str | None:
        """Load an adapter on the target; return as `collect_adapter_load` does."""
        if self._loading is None:
            self._loading = adapter.adapter_id
            target.begin_adapter_load(self._ordered(adapter))
        fault = target.collect_adapter_load()
        if fault is not None:
            self._loading = None
        if fault:
            target.unload_adapter(adapter.adapter_id)  # other ranks may have it
        return fault

    def _ordered(self, adapter: _Adapter) -> AdapterFile:
        """Return what the ranks are to load."""
        file = replace(adapter.file, is_reloaded=not self._is_new(adapter))
        if adapter.has_counterpart:
            return file
        return replace(file, draft_source="", draft_directory="")

    def _leaves_out_counterpart(self, adapter: _Adapter, fault: str) -> bool:
        """Return whether a failed reload goes on without the counterpart for the ranks' head.

        It changes no token: requests keep their adapter, and the head drafts as it is.
        """
        has_other = bool(adapter.file.draft_source) and adapter.has_counterpart
        if not has_other or self._is_new(adapter):
            return False
        adapter.has_counterpart = False
        text = "adapter %s is loaded again without its counterpart for the draft head: %s"
        logger.warning(text, adapter.file.name, fault)
        return True

    def restart(self) -> None:
        """Follow the replacement of the target, whose ranks have no adapters: load all again."""
        self._loading = None
        for adapter in self._adapters.values():
            adapter.is_loaded, adapter.has_counterpart = False, True

    def record(self, adapter_id: int, num_tokens: int, drafted: int, accepted: int) -> None:
        """Count the tokens that a step has added to a sequence, and its verified draft."""
        adapter = self._adapters[adapter_id]
        adapter.num_generated_tokens += num_tokens
        adapter.speculation = adapter.speculation.after_draft(drafted, accepted)
        tokens, speculation = self._counted[name := self._counted_as(adapter.file.name)]
        self._counted[name] = tokens + num_tokens, speculation.after_draft(drafted, accepted)

    def _counted_as(self, name: str) -> str:
        """Return what to count a used adapter as; it gets the place of one that was never used."""
        if name not in self._counted:
            if not self._has_place:
                if not self._unused:
                    return OTHER_ADAPTERS
                del self._counted[oldest := next(iter(self._unused))], self._unused[oldest]
            self._counted[name] = _UNUSED
        self._unused.pop(name, None)
        return name

    @property
    def _has_place(self) -> bool:
        """Return whether another adapter can be counted by its name."""
        return len(self._counted) - (OTHER_ADAPTERS in self._counted) < MAX_COUNTED_NAMES

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
                self._free_on_draft(adapter)
                if adapter.is_loaded:
                    target.unload_adapter(adapter_id)
                logger.info("adapter %s is unloaded", adapter.file.name)

    def _free_on_draft(self, adapter: _Adapter) -> None:
        if adapter.draft is not None and self.drafter is not None:
            self.drafter.unload_adapter(adapter.adapter_id)

    def _is_new(self, adapter: _Adapter) -> bool:
        """Return whether an adapter has not been named yet."""
        return not adapter.is_retired and self.ids.get(adapter.file.name) != adapter.adapter_id

    def _next_to_load(self) -> _Adapter | None:
        if self._loading is not None:
            return self._adapters[self._loading]
        return next((each for each in self._adapters.values() if not each.is_loaded), None)

    def _activate(self, adapter: _Adapter) -> None:
        """Name an adapter that all ranks have, in place of another one of its name."""
        adapter_id, name, is_new = adapter.adapter_id, adapter.file.name, self._is_new(adapter)
        adapter.is_loaded = True
        if name not in self._counted and name != OTHER_ADAPTERS and self._has_place:
            self._counted[name], self._unused[name] = _UNUSED, None
        elif name not in self._counted:
            self._counted.setdefault(OTHER_ADAPTERS, _UNUSED)
        logger.info(
            "adapter %s is loaded from %s", name, " and ".join(filter(None, adapter.sources))
        )
        if not is_new:
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
        is_new = self._is_new(adapter)
        self._retire(adapter_id)
        del self._adapters[adapter_id]
        self._free_on_draft(adapter)
        if is_new:
            self._faults[adapter_id] = fault
            for oldest in [*self._faults][:-_MAX_FAULTS]:
                del self._faults[oldest]
                self._last_dropped = max(self._last_dropped, oldest)
