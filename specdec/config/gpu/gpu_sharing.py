"""The choice to share a GPU between target and draft model, if the configuration leaves it open."""

from __future__ import annotations

from dataclasses import replace

from specdec.config.llm import Config


def with_gpu_sharing(config: Config, num_gpus: int) -> Config:
    """Return the configuration with `share_gpu` of its draft model decided.

    Both models share the GPU of a machine that has one, if each has one rank.
    """
    drafting, speculation = config.draft_model, config.speculative_config
    if config.device != "cuda" or drafting is None or speculation is None:
        return config
    if drafting.share_gpu is not None:
        return config
    is_one_each = config.tensor_parallel_size == drafting.draft_tensor_parallel_size == 1
    decided = replace(drafting, share_gpu=num_gpus == 1 and is_one_each)
    return replace(config, speculative_config=speculation.replacing(drafting, decided))
