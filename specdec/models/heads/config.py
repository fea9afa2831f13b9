"""Configuration of a draft head, read from its files without loading them.

`from_directory` detects the format, checks every tensor's shape against config.json and the target,
and gives the sizes that a memory plan needs. It imports no torch for safetensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.config.engine import DTYPE_BYTES, DTypeName
from specdec.config.quantization import QuantizationMethod
from specdec.models.config.decoder_tensors import linear_layers
from specdec.models.config.model_config import ModelConfig
from specdec.models.drafters.token_map import TOKEN_MAP_KEY, read_token_map
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.detect import (
    detect_method,
    head_method,
    is_in_whole_model,
    read_head,
)
from specdec.models.heads.formats.layers import with_window
from specdec.models.heads.formats.shape import HeadShape, Reading
from specdec.models.heads.formats.source import HeadSource, TensorNames, read_fields
from specdec.models.heads.formats.whole_model import WholeModelShape
from specdec.models.weights.fingerprint import files_fingerprint
from specdec.models.weights.tensor_headers import module_name
from specdec.models.weights.weight_files import read_headers
from specdec.types.drafters import MAX_LOADED_VERSIONS
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.validation import require_range

_UNADAPTED = re.compile(r"norm|experts|\.mlp\.gate\.|^(emb|ln\.|lm_head|head\.|markov_head\.)")
"""Tensors without adapters: norms, experts and routers, rows of tokens, Markov heads."""


def stores_features(device: str) -> bool:
    """Return whether the ranks on a device store the features of a head with KV.

    Others store the hidden states that features are made of, up to five times as many values: a
    rank on a CPU has the memory, and would notice the projection (docs/adr/0036).
    """
    return device == "cuda"


@dataclass(frozen=True)
class HeadConfig:
    """A draft head's checkpoint, verified against the configuration of its target.

    method: its name in the table of methods.
    token_map: the target's ids of the tokens that it may draft, ascending; None for all it has.
    """

    directory: Path
    files: tuple[Path, ...]
    method: str
    reading: Reading
    target: ModelConfig
    token_map: tuple[int, ...] | None = None

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        target: ModelConfig,
        draft_window: int | None = None,
        token_map: str | None = None,
        method: str | None = None,
    ) -> HeadConfig:
        """Read config.json and the shapes of the tensors.

        draft_window: attention window of the head's layers, instead of that in the file.
        token_map: a file of `read_token_map`. method: that is configured, as in `read_head`.

        Raises ModelNotFoundError without config.json, and UnsupportedModelError, in one line, for
        a format that is not supported or a tensor that does not fit.
        """
        source = HeadSource.open(directory)
        method, reading = read_head(source, target, method)
        purpose = f"for {reading.format}, {reading.shape.summary()}"
        used = reading.shape.tensors()
        reading.names.require(used, purpose, reading.ignored)
        source.require_values(reading.names, used)
        config = cls(directory, source.files, method, reading, target)
        if token_map is not None:
            config = config._with_token_map(token_map)
        return config if draft_window is None else config._with_window(draft_window)

    @property
    def shape(self) -> HeadShape:
        return self.reading.shape

    @property
    def names(self) -> TensorNames:
        return self.reading.names

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self.shape.taps

    @property
    def feature_size(self) -> int:
        """See DraftHead."""
        return self.shape.feature_size

    def slot_size(self, device: str) -> int:
        """Return the number of values that are stored for each slot beside the KV."""
        if stores_features(device) or not self.feature_size:
            return self.feature_size
        return max(1, len(self.taps)) * self.target.hidden_size

    @property
    def max_draft_tokens(self) -> int | None:
        """See DraftHead."""
        return self.shape.max_draft_tokens

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that can be drafted."""
        return self.shape.draft_vocab_size

    @property
    def num_draft_tokens(self) -> int | None:
        """The draft length that the files suggest, if any."""
        return self.reading.num_draft_tokens

    @property
    def num_kv_layers(self) -> int:
        """See DraftHead."""
        decoder = self.shape.decoder
        return decoder.num_layers if decoder else 0

    @property
    def max_loaded_versions(self) -> int:
        """Versions that the ranks have memory for: one of a draft model."""
        return MAX_LOADED_VERSIONS if self.shape.whole_model is None else 1

    @property
    def target_name(self) -> str | None:
        """The model that the head was trained for, if its files name one."""
        return self.reading.target_name

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weight files with the head's tensors.

        It is that of `weights_fingerprint`, unless the files are the target's.
        """
        own = {*self.names.stored.values()}
        return files_fingerprint(each for each in self.files if own & {*read_headers((each,))})

    def require_sizes_of(self, served: HeadConfig) -> None:
        """Raise UnsupportedModelError where this head cannot take the place of `served`.

        It needs the same method and sizes: features, KV, memory and costs were planned for them.
        """
        if (self.method, self.shape) != (served.method, served.shape):
            raise UnsupportedModelError(
                f"{self.directory} is {self.method}, {self.shape.summary()}; a version of the "
                f"served head must be {served.method}, {served.shape.summary()}"
            )

    def kv_bytes_per_token(self, dtype: DTypeName, tensor_parallel_size: int = 1) -> int:
        """Return the size of the head's KV of one token, on all ranks together."""
        decoder = self.shape.decoder
        return decoder.kv_bytes_per_token(dtype, tensor_parallel_size) if decoder else 0

    def weight_bytes(self, dtype: DTypeName, quantization: QuantizationMethod | None = None) -> int:
        """Return the memory of the weights on all ranks together.

        Output heads count with the rows that are loaded: at most one for each token of the map.
        """
        if (model := self.shape.whole_model) is not None:
            return model.weight_bytes(dtype, quantization)
        return sum(
            math.prod(shape) * (1 if quantization and _is_matrix(name) else DTYPE_BYTES[dtype])
            for name, shape in self._loaded_tensors().items()
            if len(shape) <= 2 and name in self.names
        )

    def adapter_bytes(self, rank: int, dtype: DTypeName) -> int:
        """Return the memory of an adapter of all `adapted_layers`, whole on a rank."""
        return rank * sum(map(sum, self.adapted_layers().values())) * DTYPE_BYTES[dtype]

    def adapted_layers(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the layers that adapters may update, by their names in the files."""
        if (model := self.shape.whole_model) is not None:
            return linear_layers(model)
        return {
            module_name(self.names.stored[name]): shape
            for name, shape in self.shape.tensors().items()
            if name.endswith(".weight") and len(shape) == 2 and not _UNADAPTED.search(name)
        }

    def _loaded_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in memory: of output heads only rows that can draft."""
        num_rows = self.draft_vocab_size
        if self.token_map is not None:
            num_rows = min(num_rows, len(self.token_map))
        tensors = dict(self.shape.tensors())
        if (heads := self.shape.output_heads) is not None:
            tensors |= {name: (num_rows, *tensors[name][1:]) for name in heads.names}
        return tensors

    def _with_window(self, window: int) -> HeadConfig:
        require_range("draft_window", window, 1, self.target.max_position_embeddings)
        decoder = self.shape.decoder
        if decoder is None:
            limit = f"left out: {self.method} has no attention"
            raise InvalidValueError("draft_window", window, limit)
        return self._with_decoder(with_window(decoder, window))

    def _with_token_map(self, path: str) -> HeadConfig:
        if isinstance(self.shape, WholeModelShape):
            tokens = read_token_map(path, self.shape.draft_vocab_size)
            shape = replace(self.shape, output_tokens=tokens)
            return replace(self, reading=replace(self.reading, shape=shape))
        if self.shape.output_heads is None:
            limit = f"left out: {self.directory} has no output head of which tokens can be selected"
            raise InvalidValueError(TOKEN_MAP_KEY, path, limit)
        return replace(self, token_map=read_token_map(path, self.target.vocab_size))

    def _with_decoder(self, decoder: ModelConfig) -> HeadConfig:
        shape = replace(self.shape, decoder=decoder)
        return replace(self, reading=replace(self.reading, shape=shape))

    def describe(self) -> tuple[str, ...]:
        """Return what the files were taken for, a line each, for the log."""
        lines = [f"taken for {self.reading.format}: {self.shape.summary()}"]
        if self.reading.notes:
            lines.append("; ".join(self.reading.notes))
        tokens = self.token_map
        if isinstance(self.shape, WholeModelShape):
            tokens = self.shape.output_tokens
        if tokens is not None:
            lines.append(f"drafts only the {len(tokens)} tokens of speculative_token_map")
        return tuple(lines)


def method_of(directory: Path) -> str:
    """Return the method that the checkpoint in `directory` is for; see `detect_method`."""
    return detect_method(HeadSource.open(directory))


def head_method_of(directory: Path) -> str | None:
    """Return the method of the head in `directory`; None if it is not a head. See `head_method`."""
    return head_method(HeadSource.open(directory))


def separate_head_method_of(directory: Path) -> str | None:
    """Return the method of a head that is not in a whole model; None for other files."""
    source = HeadSource.open(directory)
    method = head_method(source)
    return None if method is None or is_in_whole_model(source, method) else method


def suggested_draft_tokens(directory: Path) -> int | None:
    """Return the draft length that a head's config.json suggests, if any."""
    return speculators.num_draft_tokens(read_fields(directory))


def named_target(directory: Path) -> str | None:
    """Return the model that the head in `directory` was trained for, if its config.json names one.

    Raises ModelNotFoundError and UnsupportedModelError as `HeadConfig.from_directory` does.
    """
    fields = read_fields(directory)
    verifier = fields.nested("speculators_config").nested("verifier")
    for owner, name in ((verifier, "name_or_path"), (fields, "base_model_name_or_path")):
        if name in owner:
            return owner.text(name)
    return None


def _is_matrix(name: str) -> bool:
    """Return whether a tensor is a matrix that quantization applies to: no embedding, no vector.

    Routers, and the expansion of latents, stay as they are.
    """
    is_exact = "norm" in name or name.endswith((".mlp.gate.weight", ".kv_b_proj.weight"))
    return name.endswith(".weight") and not is_exact and not name.startswith(("emb", "ln."))
