"""CPU time of the whole service by process and thread, and the idle time of a clocked device.

The service runs as users start it; only its target is a device that computes nothing.
"""
