"""Other engines on the same workloads, each in its own environment and process."""
