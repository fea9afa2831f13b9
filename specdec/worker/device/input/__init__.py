"""The packed input and result of a step on the device.

What the device does with them is one folder up.
"""
