"""The `specdec` command line: one module per command, and the modules that commands share.

Commands parse flags, call other packages and print results; logic belongs in those packages.
"""
