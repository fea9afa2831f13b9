"""Drafters as modules that learn.

One file for each method: the module, its initial weights, and its published layout. Losses, data
and the loop belong in `training`; the networks that serve belong in `models.heads`.
"""

from specdec.training.drafters import draft_model as draft_model
from specdec.training.drafters import dspark as dspark
from specdec.training.drafters import eagle3 as eagle3
from specdec.training.drafters import medusa as medusa
from specdec.training.drafters import mlp_speculator as mlp_speculator
from specdec.training.drafters.base import METHODS as METHODS
from specdec.training.drafters.base import Drafter as Drafter
from specdec.training.drafters.base import drafter_class as drafter_class
