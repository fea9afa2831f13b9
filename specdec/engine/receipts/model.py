"""The description of a served model in receipts."""

from __future__ import annotations

from pathlib import Path

from specdec.config.llm import LLMConfig
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.fingerprint import model_fingerprint
from specdec.types.reports.receipts import ReceiptModel


def receipt_model(
    config: LLMConfig, directory: Path, model: ModelConfig, max_model_len: int
) -> ReceiptModel:
    """Return what a receipt states of a model; reads all weights, once in a process.

    config: with resolved dtype. Raises UnsupportedModelError for a directory without weights.
    """
    return ReceiptModel(
        name=config.request_name,
        fingerprint=model_fingerprint(directory),
        dtype=config.resolved_dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=max_model_len,
        end_token_ids=tuple(sorted(model.eos_token_ids)),
        hf_overrides=config.hf_overrides,
    )
