"""Memory of weights, and of a token in a draft head, as a plan counts them."""

from __future__ import annotations

from specdec.config.engine import DTYPE_BYTES, AdapterLimits
from specdec.config.llm import LLMConfig
from specdec.config.quantization import (
    CPU_QUANTIZATION_METHODS,
    GPU_QUANTIZATION_METHODS,
    QuantizationMethod,
)
from specdec.engine.models.model_limits import draft_adapter_fault, draft_adapter_limits
from specdec.engine.models.model_resolution import Models
from specdec.models.config.extra_weights import adapter_bytes, copied_bytes
from specdec.models.config.families.native_recurrence import as_kept
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import OutOfMemoryError

_GIB = 2**30


def weight_bytes(
    config: LLMConfig,
    model: ModelConfig,
    num_ranks: int,
    quantization: QuantizationMethod | None = None,
) -> int:
    """Return the bytes of a model's weights on GPUs; ranks dequantize inputs that are reordered."""
    stored = model.stored_weights
    is_divisible = num_ranks == 1 or stored is None or not stored.is_reordered
    keeps = config.keeps_stored_weights and is_divisible
    return model.weight_bytes(config.resolved_dtype, quantization, keeps_stored=keeps)


def require_room(
    config: LLMConfig,
    model: ModelConfig,
    available_bytes: int,
    free_bytes: int,
    *,
    name: str = "target",
    share: float = 1.0,
) -> None:
    """Raise OutOfMemoryError, with what would fit, for weights that leave no memory for KV.

    free_bytes: what all but KV leaves of the available ones. name: of the model. share: of its
    weights in that memory. Where other things need more than the weights, nothing is raised.
    """
    is_target = name == "target"
    method = config.quantization_method
    if not is_target:
        method = None if config.draft_model is None else config.draft_model.quantization
    now_bytes = int(share * model.weight_bytes(config.resolved_dtype, method))
    if free_bytes > 0 or available_bytes - free_bytes > 2 * now_bytes:
        return
    quantization = "quantization" if is_target else "speculative_config.quantization"
    fixes = [
        f"set {setting} ({size / _GIB:.1f} GiB)"
        for setting, size in _smaller_weights(config, model, quantization, share).items()
        if now_bytes - size > -free_bytes
    ]
    if config.device == "cuda":
        size = "tensor_parallel_size" if is_target else "draft_tensor_parallel_size"
        fixes.insert(0, f"raise {'' if is_target else 'speculative_config.'}{size}")
    place = "rank of the " if share < 1 or config.device == "cuda" else ""
    raise OutOfMemoryError(
        f"a {place}{name} needs {now_bytes / _GIB:.1f} GiB for weights as "
        f"{method or config.resolved_dtype} beside "
        f"{(available_bytes - free_bytes - now_bytes) / _GIB:.1f} GiB for all else but the KV "
        f"cache, and {available_bytes / _GIB:.1f} GiB are free: "
        f"{', or '.join(fixes) or 'no precision fits; choose a smaller model'}"
    )


def _smaller_weights(
    config: LLMConfig, model: ModelConfig, quantization: str, share: float
) -> dict[str, int]:
    """Return the bytes of a model's weights by the setting that gives another precision."""
    found = {"dtype bfloat16": model.weight_bytes("bfloat16")}
    methods = GPU_QUANTIZATION_METHODS if config.device == "cuda" else CPU_QUANTIZATION_METHODS[:1]
    if model.transformers is None:
        for each in methods:
            found[f"{quantization} {each}"] = model.weight_bytes(config.resolved_dtype, each)
    return {setting: int(share * size) for setting, size in found.items()}


def state_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the states of a target's recurrent layers on all ranks; 0 without any."""
    if model.recurrent is None:
        return 0
    speculation, dtype = config.speculative_config, config.resolved_dtype
    num_guesses = 0 if speculation is None else speculation.max_row_guesses
    recurrent = as_kept(model.recurrent, is_triton=config.wants_triton)
    of_sequence = recurrent.state_bytes(dtype, config.tensor_parallel_size, num_guesses)
    return config.max_num_seqs * of_sequence


def draft_state_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of the states of a draft model's recurrent layers; 0 without any."""
    drafting, speculation = config.draft_model, config.speculative_config
    if models.draft is None or models.draft.recurrent is None or not drafting or not speculation:
        return 0
    size, dtype = drafting.draft_tensor_parallel_size, config.resolved_dtype
    recurrent = as_kept(models.draft.recurrent, is_triton=config.wants_triton)
    of_sequence = recurrent.state_bytes(dtype, size, speculation.max_chain_guesses)
    return config.max_num_seqs * of_sequence


def head_bytes_per_token(config: LLMConfig, models: Models) -> int:
    """Return the bytes of a token in a draft head on all ranks: of its KV and what that needs."""
    head, size = models.head, config.tensor_parallel_size
    if head is None or head.num_kv_layers == 0:
        return 0
    num_values = size * head.slot_size(config.device)
    num_bytes = num_values * DTYPE_BYTES[config.resolved_dtype]
    return head.kv_bytes_per_token(config.resolved_dtype, size) + num_bytes


def draft_block_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of a head's KV after the pool of GPUs, for blocks of drafts."""
    head, speculation = models.head, config.speculative_config
    if head is None or speculation is None or config.device != "cuda":
        return 0
    num_blocks = -(-head.shape.block_len(speculation.max_chain_tokens) // config.block_size)
    num_slots = config.max_num_seqs * num_blocks * config.block_size
    return num_slots * head.kv_bytes_per_token(config.resolved_dtype, config.tensor_parallel_size)


def extra_weight_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of the weights that the ranks of the target hold beside its own at most."""
    size = config.tensor_parallel_size
    adapters = _adapter_bytes(config, models.target, config.adapter_limits, size)
    copies = copied_bytes(models.target, config.resolved_dtype, size, config.quantization_method)
    return (
        _head_weight_bytes(config, models) + _head_adapter_bytes(config, models) + adapters + copies
    )


def extra_draft_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of the weights that the ranks of the draft model hold beside its own."""
    if models.draft is None or config.draft_model is None:
        return 0
    limits = draft_adapter_limits(config, models.draft)
    drafting = config.draft_model
    size = drafting.draft_tensor_parallel_size
    copies = copied_bytes(models.draft, config.resolved_dtype, size, drafting.quantization)
    return _adapter_bytes(config, models.draft, limits, size) + copies


def _adapter_bytes(
    config: LLMConfig, model: ModelConfig, limits: AdapterLimits | None, num_ranks: int
) -> int:
    """Return the bytes of the adapters that the ranks of a model hold at most."""
    if limits is None:
        return 0
    rank = limits.max_rank if config.device == "cpu" else limits.device_rank
    each = adapter_bytes(model, rank, config.resolved_dtype, num_ranks)
    return limits.max_loaded * each


def _head_adapter_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of the adapters of a draft head that the ranks hold at most.

    Each version has them in the layout of its products, and ranks keep them for later versions.
    """
    limits, head = config.adapter_limits, models.head
    has_none = models.draft is not None or bool(draft_adapter_fault(config, None))
    if limits is None or head is None or has_none:
        return 0
    each = head.adapter_bytes(limits.max_rank, config.resolved_dtype)
    num_copies = (head.max_loaded_versions + 1) * config.tensor_parallel_size
    return limits.max_loaded * num_copies * each


def _head_weight_bytes(config: LLMConfig, models: Models) -> int:
    """Return the bytes of the versions of a draft head that the ranks hold at most."""
    if models.head is None or config.head is None:
        return 0
    quantization, model = config.head.quantization, models.head.shape.whole_model
    if model is not None:
        size = config.tensor_parallel_size
        copies = copied_bytes(model, config.resolved_dtype, size, quantization)
        return weight_bytes(config, model, size, quantization) + copies
    version_bytes = models.head.weight_bytes(config.resolved_dtype, quantization)
    return models.head.max_loaded_versions * version_bytes
