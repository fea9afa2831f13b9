"""Entry of a head method that docs/methods.md adds; `layout` and `network` are its other files."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config.speculation.head_methods import HeadMethodConfig


@dataclass(frozen=True)
class BigramConfig(HeadMethodConfig):
    """Bigrams: a table of what follows each token."""

    name = "bigram"
    other_names = ("BIGRAM",)
    head_format = "tests.specdec.bigram.layout:BIGRAM"
    network = "tests.specdec.bigram.network:BigramHead"
