"""The output heads of which a list of tokens (`specdec.models.token_map`) selects rows."""

from __future__ import annotations

from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.formats.shape import HeadShape


def output_head_names(shape: HeadShape) -> tuple[str, ...]:
    """Return the tensors with a row for each draft token; none if the list cannot select rows."""
    match shape:
        case MedusaShape():
            return shape.lm_head_names
        case Eagle3Shape(has_lm_head=True):
            return ("lm_head.weight",)
        case DFlashShape(has_lm_head=True, markov_rank=0):
            return ("lm_head.weight",)
        case DFlashShape(has_lm_head=True):
            return ("lm_head.weight", "markov_head.markov_w2.weight")
        case _:
            return ()
