"""The division of memory, of hosts and GPUs, among weights, workspace and the KV of all models.

Only sizes are computed here; the ranks allocate.
"""
