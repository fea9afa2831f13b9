"""The command line: one module a command, and what commands share.

It only parses, calls and prints; what a command does belongs to the folders below.
"""
