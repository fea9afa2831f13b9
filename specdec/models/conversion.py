"""Conversion of a GGUF file to a directory in the Hugging Face layout."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from specdec.config.engine import DTypeName


def convert(gguf: Path, directory: Path, splits_digits: bool, dtype: DTypeName) -> None:
    """Write the model in `gguf`, dequantized to `dtype`, to `directory` in Hugging Face layout.

    splits_digits: whether the tokenizer splits each digit; see PackagedModel.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec.models.dtypes import DTYPES

    with redirect_stderr(io.StringIO()):  # hides the progress bars of transformers
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    model.to(DTYPES[dtype])
    model.config.dtype = dtype
    if splits_digits:
        _split_digits(tokenizer)
    tokenizer.save_pretrained(directory)
    save_file(_distinct_tensors(model), directory / "model.safetensors", {"format": "pt"})
    # The model is dequantized, and save_pretrained rejects one that is marked as quantized.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # safetensors creates files for the owner only; a shared cache needs the mode of the umask.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _split_digits(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import Digits, Sequence

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


def _distinct_tensors(model: Any) -> dict[str, Any]:
    """Return the weights by name; tied weights appear under their first name only."""
    by_storage: dict[int, tuple[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        by_storage.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    return dict(by_storage.values())
