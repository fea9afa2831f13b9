"""The `lora_int_id`s of the adapters of an `LLM`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Lock

from specdec.types.adapters import LoRARequest
from specdec.types.errors import InvalidValueError


class LoRAIds:
    """Names by `lora_int_id`, each while its adapter is present or an open call uses it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: dict[int, str] = {}
        self._num_calls: Counter[int] = Counter()

    def name_of(self, lora: str | int, present: Collection[str]) -> str:
        """Return the name of an adapter by name or id. Raises InvalidValueError for another id.

        present: names of the adapters that are loaded or ordered.
        """
        if isinstance(lora, str):
            return lora
        with self._lock:
            name = self._names.get(lora) if type(lora) is int else None
        if name is None or name not in present:
            raise InvalidValueError("lora_int_id", lora, "the id of a loaded adapter")
        return name

    @contextmanager
    def used_by_call(
        self, lora: LoRARequest, present: Callable[[], Collection[str]]
    ) -> Iterator[None]:
        """Reserve the id for a call. Raises InvalidValueError if it is another adapter's.

        present: returns the names of the adapters that are loaded or ordered.
        """
        number = lora.lora_int_id
        with self._lock:
            names = present()
            known = self._names.get(number, lora.lora_name)
            if known != lora.lora_name and (self._num_calls[number] or known in names):
                limit = f"one that no other adapter has; {known} has this one"
                raise InvalidValueError("lora_int_id", number, limit)
            kept = {*names} - {lora.lora_name}
            for former in [each for each, name in self._names.items() if name not in kept]:
                if not self._num_calls[former]:
                    del self._names[former]
            self._names[number] = lora.lora_name
            self._num_calls[number] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls[number] -= 1
                if not self._num_calls[number]:
                    del self._num_calls[number]
