"""The choice to run a draft model in the processes of the target's ranks.

Two processes on a GPU take turns, and no step begins ahead of the drafts. In the target's step they
cost their passes alone, and the ranks hold them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specdec.config.llm import Config
from specdec.config.speculation.head_methods import ColocatedDraftModelConfig
from specdec.config.speculation.methods import DraftModelConfig
from specdec.engine.models.model_resolution import has_same_tokens
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.whole_model import fault_of_model
from specdec.models.hub import Progress
from specdec.models.resolve import resolve

_KEPT_KEYS = ("quantization", "draft_window", "speculative_token_map", "share_gpu")
"""Keys of a draft model that do not need a worker."""


def with_colocated_draft(config: Config, progress: Progress) -> Config:
    """Return the configuration whose draft model is in the target's processes, if it can be.

    For models that share a GPU. Where it cannot, a line gives the reason, and a worker drafts.
    """
    drafting, speculation = config.draft_model, config.speculative_config
    if drafting is None or speculation is None:
        return config
    if (reason := _reason_for_worker(config, drafting, progress)) is not None:
        progress(f"a worker runs the draft model, on the target's GPU: {reason}")
        return config
    colocated = ColocatedDraftModelConfig(
        model=drafting.model or config.model,
        quantization=drafting.quantization,
        draft_window=drafting.draft_window,
        speculative_token_map=drafting.speculative_token_map,
    )
    progress(
        f"the draft model runs in the target's process, on the same GPU: method {colocated.name}"
    )
    return replace(config, speculative_config=speculation.replacing(drafting, colocated))


def _reason_for_worker(
    config: Config, drafting: DraftModelConfig, progress: Progress
) -> str | None:
    """Return why a draft model needs a worker; None where it does not."""
    speculation = config.speculative_config
    if speculation is not None and speculation.head is not None:
        return f"the target's ranks draft by {speculation.head.name}"
    plain = DraftModelConfig(model=drafting.model)
    for key, value in vars(drafting).items():
        if key != "model" and key not in _KEPT_KEYS and value != getattr(plain, key):
            return f"{key} is {value}"
    if config.adapter_limits is not None:
        return "it may have separate adapters"
    if config.kv_cache_dtype != "auto":
        return f"kv_cache_dtype is {config.kv_cache_dtype}"
    if speculation is not None and speculation.verifier in ("rejection", "block"):
        return f"verifier {speculation.verifier} uses the probabilities of its drafts"
    target = resolve(config.model, progress=progress)
    draft = target if drafting.model is None else resolve(drafting.model, progress=progress)
    return _fault_of_files(config, draft, target)


def _fault_of_files(config: Config, draft: Path, target: Path) -> str | None:
    own = ModelConfig.from_directory(draft)
    served = ModelConfig.from_directory(target, config.model_options)
    if served.transformers is not None or served.recurrent is not None:
        return "the target takes no draft heads"
    if (fault := fault_of_model(own, served)) is not None:
        return fault
    if own.max_position_embeddings < (config.max_model_len or served.max_position_embeddings):
        return f"its context has {own.max_position_embeddings} tokens"
    if not has_same_tokens(draft, target, config.model_options):
        return "its vocabulary is not the target's"
    return None
