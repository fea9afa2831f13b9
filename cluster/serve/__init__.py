"""Ray Serve.

The deployments, start-up on a local or a given Ray, autoscaling, and every use of Ray's private
names. What a replica does belongs in `replica`.
"""
