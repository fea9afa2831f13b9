"""The control plane.

What operators want of speculation, the state of the fleet, and the replicas' link to it. It is on
no request's path. The interfaces to it belong in `api`.
"""
