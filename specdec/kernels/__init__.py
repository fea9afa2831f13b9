"""Kernels, each beside its torch reference.

Paged attention and sampling in this folder, C++ for CPUs in `cpu`, Triton for GPUs in `triton`. A
kernel gets tensors and plain arrays; which layer calls it, and how it is split over ranks, belongs
in `models`. `tensor_parallel` has the groups of ranks and their collectives; starting the processes
belongs in `cluster.workers`.
"""

from specdec.kernels.reference.attention import AttentionPlan, Rotation
from specdec.kernels.reference.paged_attention import PagedAttention

__all__ = ["AttentionPlan", "PagedAttention", "Rotation"]
