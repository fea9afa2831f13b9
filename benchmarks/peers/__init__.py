"""Other engines on the same work: each in an environment and a process of its own."""
