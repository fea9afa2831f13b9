"""The state of running requests on the engine's side.

Sequences, their KV blocks, buffered output tokens, and the view of them that the workers hold. The
order in which sequences run belongs in `engine`, their state on a rank in `worker`.
"""
