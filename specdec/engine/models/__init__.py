"""Completion and resolution of the models that a configuration names, before any rank is started.

Reading the files of a model belongs in `specdec.models`.
"""
