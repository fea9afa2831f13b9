"""Makes a rank's worker from a model directory."""

from __future__ import annotations

from pathlib import Path

from specdec.config import DTYPES, DTypeName, EngineConfig, ModelConfig, QuantizationMethod
from specdec.models import load_model
from specdec.parallel import TensorParallelGroup
from specdec.runner.model_runner import ModelRunner


def load_runner(
    directory: Path,
    dtype: DTypeName,
    config: EngineConfig,
    group: TensorParallelGroup,
    quantization: QuantizationMethod | None = None,
) -> ModelRunner:
    """Loads this rank's share of the model and allocates its KV pool.

    quantization: as in `load_model`; `w8a8` is for drafts alone.
    """
    model_config = ModelConfig.from_directory(directory)
    model = load_model(
        directory,
        model_config,
        group,
        dtype=DTYPES[dtype],
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        quantization=quantization,
    )
    return ModelRunner(
        model,
        group,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
    )
