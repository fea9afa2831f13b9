"""LoRA adapters (Hu et al. 2021) on a rank of a decoder: PEFT's files, and the products with them.

A row of a batch runs with the adapter of its sequence, or with none. Which adapters are loaded is
decided by the engine; what a request is allowed to use belongs in `engine` and `cluster`.
"""
