"""Prompt lookup on the target's ranks: where it is, and the memory of the texts on their GPUs."""

from __future__ import annotations

from specdec.config.hardware import has_triton_package
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculation.target_lookup import TargetNgramConfig, with_lookup_on_ranks
from specdec.models.config.model_config import ModelConfig

_TOKEN_BYTES = 4


def served_speculation(config: LLMConfig, target: ModelConfig) -> SpeculativeConfig | None:
    """Return the speculation of an engine, with lookups where they are faster.

    A step that the GPU runs without the host begins before the engine has the tokens of the one
    before. On a CPU, and by transformers' code, steps wait for the host in any case. Torch's
    operators would take hundreds of megabytes for long texts.
    """
    speculation, is_on_gpu = config.speculative_config, config.device == "cuda"
    has_kernel = config.kernels != "torch" and has_triton_package()
    if speculation is None or not is_on_gpu or target.transformers or not has_kernel:
        return speculation
    return with_lookup_on_ranks(speculation)


def lookup_bytes(config: LLMConfig, target: ModelConfig) -> int:
    """Return the bytes of the texts of all sequences, for lookups (`worker.device.head.lookup`)."""
    speculation = served_speculation(config, target)
    drafters = speculation.drafters if speculation else ()
    if not any(isinstance(each, TargetNgramConfig) for each in drafters):
        return 0
    longest = config.max_model_len or target.max_position_embeddings
    return (config.max_num_seqs + 1) * (longest + 1) * _TOKEN_BYTES
