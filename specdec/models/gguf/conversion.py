"""Conversion of a GGUF file to a model directory in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from specdec.config.engine import DTypeName
from specdec.models.gguf.gguf_model import GGUFModel
from specdec.models.gguf.header import read_header
from specdec.models.gguf.tensors import convert_tensors, read_rope_factors, require_whole
from specdec.models.gguf.tokenizers import convert_tokenizer


def convert(path: Path, directory: Path, splits_digits: bool, dtype: DTypeName) -> None:
    """Write the model in a GGUF file, dequantized to `dtype`, to `directory`.

    splits_digits: whether the tokenizer splits each digit; see PackagedModel.

    Raises UnsupportedModelError, with its name, for a key or a tensor that is not understood or is
    missing: nothing of the model is guessed.
    """
    from safetensors.torch import save_file

    from specdec.models.dtypes import DTYPES

    header = read_header(path)
    require_whole(header)
    model = GGUFModel.of(header)
    config = {**model.config(read_rope_factors(model)), "dtype": dtype}
    tokenizer = convert_tokenizer(path, model.header.metadata, splits_digits=splits_digits)
    tokenizer.save_pretrained(directory)
    weights = directory / "model.safetensors"
    save_file(convert_tensors(model, DTYPES[dtype]), weights, {"format": "pt"})
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", ends)
    # safetensors creates files for the owner only; a shared cache needs the mode of the umask.
    shutil.copymode(directory / "config.json", weights)


def add_sampling_defaults(directory: Path, sampling: Mapping[str, object]) -> None:
    """Add keys to the generation_config.json of a converted model."""
    path = directory / "generation_config.json"
    _write_json(path, {**json.loads(path.read_text()), **sampling})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
