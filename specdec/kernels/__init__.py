"""Device kernels, each beside its torch reference."""

from specdec.kernels.attention import AttentionPlan, PagedAttention

__all__ = ["AttentionPlan", "PagedAttention"]
