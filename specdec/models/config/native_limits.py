"""Features without native kernels: torch runs models that have them on a CPU too."""

from __future__ import annotations

from specdec.models.config.families.native_recurrence import recurrence_fault
from specdec.models.config.model_config import ModelConfig


def native_fault(config: ModelConfig, max_model_len: int | None = None) -> str | None:
    """Return what of a model has no native kernel; None where the native decoder runs it.

    max_model_len: of the service; None for the longest that the model has.
    """
    chunk = config.traits.attention_chunk
    longest = config.max_position_embeddings if max_model_len is None else max_model_len
    faults = {
        "layers of different shapes": config.varied is not None,
        f"chunks of {chunk} tokens (max_model_len {longest})": chunk is not None
        and longest > chunk,
    }
    if config.latent is not None and (indexer := config.latent.in_context(longest).indexer):
        faults[f"choices of {indexer.num_chosen} tokens (max_model_len {longest})"] = True
    found = next((name for name, is_found in faults.items() if is_found), None)
    return recurrence_fault(config.recurrent) if found is None and config.recurrent else found
