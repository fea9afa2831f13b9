"""Adapters of a draft head in the memory of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.networks.base import DraftHead
from specdec.models.layers.linear import Projection
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import AdapterStore, LowRankUpdate, read_updates
from specdec.models.weights.tensor_headers import module_name
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class _Adapter:
    """This rank's part of an adapter.

    head_sha256: as in AdapterFiles. updates: by the projections of a layer, equal in all versions.
    """

    head_sha256: str
    updates: Mapping[tuple[Projection, ...], LowRankUpdate]


@dataclass(frozen=True)
class _Version:
    """A version of the head that is in memory. fingerprint: of its files when they were loaded."""

    config: HeadConfig
    fingerprint: str
    store: AdapterStore

    def is_base_of(self, head_sha256: str) -> bool:
        """Return whether an adapter was made for this version."""
        return head_sha256 in ("", self.fingerprint)

    def read(self, files: AdapterFiles) -> _Adapter:
        """Read an adapter. Raises UnsupportedModelError for files that do not fit."""
        own = {
            module_name(stored): name.removesuffix(".weight")
            for name, stored in self.config.names.stored.items()
        }
        shapes = {
            each.name: each.shape for linear in self.store.linears for each in linear.projections
        }
        known = {stored: shapes[name] for stored, name in own.items() if name in shapes}
        files.require_modules(known, "draft head's layers")
        updates = read_updates(self.store, files.renamed(own))
        by_layer = {tuple(linear.projections): each for linear, each in updates.items()}
        return _Adapter(files.head_sha256, by_layer)

    def set(self, adapter_id: int, adapter: _Adapter | None) -> None:
        """Add an adapter; None, or one of another version, changes nothing."""
        updates = adapter.updates if adapter and self.is_base_of(adapter.head_sha256) else {}
        by_layer = {tuple(each.projections): each for each in self.store.linears}
        self.store.set(adapter_id, {by_layer[key]: each for key, each in updates.items()})


class HeadAdapters:
    """Adapters for all versions of a head, of which each takes those that were made for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of the head's activations."""
        self._dtype = dtype
        self._versions: WeakKeyDictionary[DraftHead, _Version] = WeakKeyDictionary()
        self._adapters: dict[int, _Adapter | None] = {}

    def serve(self, head: DraftHead, config: HeadConfig) -> None:
        """Let a version that was loaded take adapters, first those that are loaded."""
        version = _Version(config, config.fingerprint(), head.enable_adapters(self._dtype))
        for adapter_id, adapter in self._adapters.items():
            version.set(adapter_id, adapter)
        self._versions[head] = version

    def load(
        self, adapter_id: int, files: AdapterFiles | None, *, needs_version: bool = True
    ) -> None:
        """Add an adapter; None where requests with its id are drafted for by the head as it is.

        needs_version: whether it must have been made for a version in memory. Raises
        UnsupportedModelError, and adds nothing, for files that do not fit.
        """
        versions = list(self._versions.values())
        if files is not None and needs_version:
            _require_version(files, versions)
        adapter = None if files is None else _base_of(files, versions).read(files)
        self._adapters[adapter_id] = adapter
        for version in versions:
            version.set(adapter_id, adapter)

    def drop(self, adapter_id: int) -> None:
        """Free an adapter that no later step names."""
        self._adapters.pop(adapter_id, None)
        for version in self._versions.values():
            version.store.drop(adapter_id)


def _base_of(files: AdapterFiles, versions: list[_Version]) -> _Version:
    """Return the version that an adapter was made for, whose names it has; else the first one."""
    return next((each for each in versions if each.is_base_of(files.head_sha256)), versions[0])


def _require_version(files: AdapterFiles, versions: list[_Version]) -> None:
    if not any(each.is_base_of(files.head_sha256) for each in versions):
        raise UnsupportedModelError(
            f"{files.directory} was made for a head with weights {files.head_sha256:.12}; the "
            f"served one is {versions[0].config.directory}"
        )
