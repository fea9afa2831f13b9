"""Models, and where their files come from."""

from specdec.models.llama import LlamaForCausalLM, load_model

__all__ = ["LlamaForCausalLM", "load_model"]
