"""Drafters that come with the package: a folder each, by name, with a card and its weights, if any.

`specdec.config.model_aliases` lists them by the model that they were made for. `specdec train` or
`specdec train-data` and `specdec eval-drafter --card` make the files. `token_map` reads the list of
tokens that a draft model may draft; nothing else belongs here.
"""
