"""The weights of adapters as updates of a rank's linear layers, sharded as the layers are.

A layer that divides its outputs (columns of Megatron's naming) has all of A and its rows of B. A
layer that divides its inputs has its columns of A and all of B, so the ranks' updates are partial
sums, which the layer's all-reduce adds up with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.backend import KernelBackend
from specdec.models.layers.latent_expansion import LatentExpansion
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    in_order,
)
from specdec.models.layers.matrix import NativeMatrix, make_matrix
from specdec.models.lora.peft import AdapterFiles
from specdec.models.weights.stored_tensors import PickledTensors, StoredTensors, TensorSource
from specdec.models.weights.weight_files import PICKLED
from specdec.types.errors import UnsupportedModelError

Linear = ColumnParallelLinear | RowParallelLinear | LatentExpansion


@dataclass(frozen=True)
class Expansion:
    """B of one projection, scaled: y[:, outputs] += h[:, ranks] weight^T.

    outputs: columns of the layer's output on this rank. ranks: columns of the result of A.
    """

    outputs: slice
    ranks: slice
    weight: Tensor  # [outputs, ranks]


@dataclass(frozen=True)
class LowRankUpdate:
    """Update of one linear layer by one adapter on one rank (Hu et al. 2021, section 4).

    shrink: the matrices A of all projections with an adapter, below each other.
    """

    shrink: Tensor  # [sum of ranks, inputs of this rank]
    expansions: tuple[Expansion, ...]


@dataclass(frozen=True)
class HeadUpdate:
    """Update of one matrix of each head: y += (x down^T) up^T."""

    down: Tensor  # [heads, ranks, in_features], or [1, ranks, in_features] for all heads
    up: Tensor  # [heads, out_features, ranks], or [1, out_features, ranks]


def by_half(update: LowRankUpdate, layer: LatentExpansion) -> tuple[HeadUpdate, HeadUpdate]:
    """Return the updates of both halves: of what is applied to queries, and of that for values.

    A head's keys are k = (W + B A) c of a latent c, so a score q k is (q W + (q B) A) c: the rows
    of B that belong to keys come first, transposed. Values are expanded after attention as they
    are, by A and then by their rows of B.
    """
    (expansion,) = update.expansions
    keys, values = layer.halves(expansion.weight)
    down = update.shrink[None]
    return HeadUpdate(keys.transpose(1, 2), down.transpose(1, 2)), HeadUpdate(down, values)


def native_update(weight: Tensor) -> NativeMatrix:
    """Return a matrix [out_features, in_features] of an update for the native kernels."""
    shape = (weight.shape[0], weight.shape[1])
    matrix = make_matrix([weight.contiguous()], shape, torch.float32, backend=KernelBackend.CPU)
    assert isinstance(matrix, NativeMatrix)
    return matrix


class AdapterStore(Protocol):
    """The adapters in the memory of one rank of a decoder, with which tokens of a pass may run."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def linears(self) -> Sequence[Linear]:
        """The layers that adapters may update."""
        ...

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """Add an adapter under an id that no other one has; without updates it changes nothing."""
        ...

    def drop(self, adapter_id: int) -> None:
        """Free an adapter, which no later pass may name; ignore an id without one."""
        ...


def load_adapter(store: AdapterStore, adapter_id: int, files: AdapterFiles | None) -> None:
    """Read this rank's part of an adapter and add it; None for one that changes nothing.

    Raises UnsupportedModelError, and adds nothing, for files that do not fit the decoder.
    """
    store.set(adapter_id, {} if files is None else read_updates(store, files))


def read_updates(store: AdapterStore, files: AdapterFiles) -> dict[Linear, LowRankUpdate]:
    """Read this rank's part of an adapter; raises as `load_adapter` does."""
    reader = AdapterReader(files, store.dtype)
    reader.require_modules(store.linears)
    found = ((linear, reader.update_of(linear)) for linear in store.linears)
    return {linear: each for linear, each in found if each is not None}


class AdapterReader:
    """Reads this rank's part of an adapter for each linear layer of a decoder."""

    def __init__(self, files: AdapterFiles, dtype: torch.dtype) -> None:
        """dtype: of the model, in which a 16-bit one has its adapters too.

        The adapters of a float32 model keep their 16-bit values, where the file has such.
        """
        self._files = files
        self._dtype = dtype
        paths = [files.weights]
        self._tensors: TensorSource = (
            PickledTensors(paths, files.directory)
            if files.weights.suffix in PICKLED
            else StoredTensors(paths, files.directory)
        )

    def require_modules(self, linears: Sequence[Linear]) -> None:
        """Raise UnsupportedModelError unless each module is one of these with the same shape."""
        known = {each.name: each.shape for linear in linears for each in linear.projections}
        self._files.require_modules(known)

    def update_of(self, linear: Linear) -> LowRankUpdate | None:
        """Return the update of a layer; None where the adapter leaves it as it is.

        Raises UnsupportedModelError for weights that are not finite.
        """
        found = [pair for pair in placed(linear.projections) if pair[1].name in self._files.ranks]
        if not found:
            return None
        shrinks: dict[str, Tensor] = {}  # by tensor, which may hold the rows of several projections
        ranks: dict[str, slice] = {}
        for _, projection in found:
            name = projection.name
            if name not in shrinks:
                first = sum(map(len, shrinks.values()))
                ranks[name] = slice(first, first + self._files.ranks[name])
                shrinks[name] = self._read_down(projection)
        expansions = (
            Expansion(outputs, ranks[each.name], self._read_up(each)) for outputs, each in found
        )
        return LowRankUpdate(torch.cat([*shrinks.values()]), tuple(expansions))

    def _read_down(self, projection: Projection) -> Tensor:
        """Return A's columns of this rank."""
        columns = slice(projection.inputs.start, projection.inputs.stop)
        name = self._files.names[projection.name][0]
        return self._stored(name, self._tensors.slice(name, slice(None), columns).float())

    def _read_up(self, projection: Projection) -> Tensor:
        """Return B's rows of this rank, scaled."""
        rows = slice(projection.outputs.start, projection.outputs.stop)
        name = self._files.names[projection.name][1]
        up = in_order(self._tensors.slice(name, rows, slice(None)).float(), projection.order)
        return self._stored(name, up * self._files.scales[projection.name])

    def _stored(self, name: str, values: Tensor) -> Tensor:
        """Return values in the model's dtype, or in 16 bits where these represent them exactly.

        Raises UnsupportedModelError for values of the tensor `name` that are not finite there.
        """
        stored = values.to(self._dtype)
        if not stored.isfinite().all():
            dtype = str(self._dtype).removeprefix("torch.")
            raise UnsupportedModelError(f"{self._files.weights}: {name} has NaN or Inf in {dtype}")
        if self._dtype != torch.float32:
            return stored
        short = values.to(torch.bfloat16)
        return short if torch.equal(short.float(), values) else values


def placed(projections: Sequence[Projection]) -> Iterator[tuple[slice, Projection]]:
    """Yield projections with their outputs in the layer's output on this rank."""
    end = 0
    for each in projections:
        start, end = end, end + len(each.outputs)
        yield slice(start, end), each
