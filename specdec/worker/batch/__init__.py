"""Steps on the host: the state of a rank's sequences, its rows, and their verification.

Steps that the device runs without the host belong in `worker.device`.
"""
