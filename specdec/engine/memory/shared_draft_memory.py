"""Memory of a draft worker that several engines share: one copy of the weights, a KV pool each."""

from __future__ import annotations

from specdec.config.engine import DraftLimits
from specdec.config.llm import LLMConfig
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.host_memory import PROCESS_BYTES
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.weight_memory import weight_bytes
from specdec.engine.models.model_resolution import Models, with_resolved_dtype

UNLIMITED_BYTES = 2**60


def seat_bytes(config: LLMConfig, models: Models, worker_bytes: int, num_seats: int) -> int:
    """Return the bytes that the plan of one engine may count on for its draft model.

    That is all of the weights and processes, which the engines share, and an even part of the rest;
    the graphs of a GPU are for the sequences of all engines. worker_bytes: that the worker may use.
    """
    drafting, model = config.draft_model, models.draft
    assert drafting is not None, "no draft model is configured"
    assert model is not None, "no draft model was found"
    config = with_resolved_dtype(config, models)
    size, method = drafting.draft_tensor_parallel_size, drafting.quantization
    shared_bytes = of_worker_bytes = weight_bytes(config, model, size, method)
    if config.device == "cuda":
        shared_bytes += gpu_workspace_bytes(config, model, drafts=True)
        of_worker_bytes += gpu_workspace_bytes(config, model, drafts=True, num_engines=num_seats)
    else:
        shared_bytes += PROCESS_BYTES
        of_worker_bytes += PROCESS_BYTES
    return shared_bytes + max(0, worker_bytes - of_worker_bytes) // num_seats


def seat_limits(config: LLMConfig, models: Models, draft_bytes: int) -> DraftLimits:
    """Return the limits of one engine's part of a worker. draft_bytes: of `seat_bytes`.

    Raises what `memory_plan` raises.
    """
    resolved = with_resolved_dtype(config, models)
    limits = memory_plan(resolved, models, UNLIMITED_BYTES, draft_bytes).draft
    assert limits is not None, "no draft model is configured"
    return limits
