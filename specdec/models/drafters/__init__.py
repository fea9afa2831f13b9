"""Drafters that come with the package: a folder each, by name, with a card and its weights, if any.

`specdec.config.model_aliases` lists them by the model that they were made for. `specdec train` or
`specdec train-data` and `specdec eval-drafter --card` make the files; nothing else belongs here.
"""
