"""Ray as the workers need it: a private runtime, resources and placement, and its private names.

Actors belong in `workers.rank`, the session of a service in `cluster.serve`.
"""
