"""Memory of a GPU beside weights and KV: libraries, activations, logits and graphs.

The sizes are upper estimates by the shapes of the largest step, and not measured on a GPU yet.
"""

from __future__ import annotations

from specdec.config.engine import DTYPE_BYTES
from specdec.config.graph_sizes import num_graph_sizes
from specdec.config.llm import LLMConfig
from specdec.models.config import ModelConfig

_MIB, _GIB = 2**20, 2**30
_LIBRARY_BYTES = _GIB
"""The context of CUDA, the code and workspaces of its libraries, and fragmentation."""
_SAMPLING_BYTES = 400 * _MIB
"""Of the rows that are sampled at once, whatever the batch is (`specdec.sampling`)."""
_ATTENTION_BYTES = 256 * _MIB
"""Of the parts of contexts that attention splits, at most (`specdec.kernels.triton`)."""
_GRAPHS_BYTES = 6 * _MIB
"""Of the four graphs of one size: that of the forward pass has a node for each kernel."""


def gpu_workspace_bytes(config: LLMConfig, model: ModelConfig, *, drafts: bool) -> int:
    """Return the bytes of one rank beside weights and KV.

    drafts: whether it is a rank of a draft model, which samples a row a sequence and has no graphs.
    """
    return (
        _LIBRARY_BYTES
        + _ATTENTION_BYTES
        + _activation_bytes(config, model)
        + _logit_bytes(config, model, drafts=drafts)
        + (0 if drafts else _graph_bytes(config))
    )


def _activation_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the activations of a layer, with those of the largest step."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    values = 4 * model.hidden_size + heads + 3 * model.intermediate_size
    return config.max_num_batched_tokens * values * DTYPE_BYTES[config.resolved_dtype]


def _logit_bytes(config: LLMConfig, model: ModelConfig, *, drafts: bool) -> int:
    rows_of_sequence = 1 if drafts else 1 + _num_draft_tokens(config)
    float32_bytes = 4
    logits = config.max_num_seqs * rows_of_sequence * model.vocab_size * float32_bytes
    return logits + _SAMPLING_BYTES


def _graph_bytes(config: LLMConfig) -> int:
    """Return the bytes of the graphs of a target, if it captures some."""
    if config.enforce_eager or config.head is not None:
        return 0
    return _GRAPHS_BYTES * num_graph_sizes(config.max_num_seqs, _num_draft_tokens(config))


def _num_draft_tokens(config: LLMConfig) -> int:
    speculation = config.speculative_config
    return 0 if speculation is None else speculation.max_chain_tokens
