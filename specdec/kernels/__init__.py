"""Kernels, each beside its torch reference.

Paged attention and sampling in this folder, C++ for CPUs in `cpu`, Triton for GPUs in `triton`. A
kernel gets tensors and plain arrays; which layer calls it belongs in `models`.
"""

from specdec.kernels.attention import AttentionPlan, PagedAttention

__all__ = ["AttentionPlan", "PagedAttention"]
