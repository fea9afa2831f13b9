"""The latencies that requests should have: the service level objective of `--slo`."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from specdec.types.errors import InvalidValueError


class Objective(NamedTuple):
    """The service level objective: latencies that requests should have.

    first_token_s: limit of the time to the first token. output_token_s: of the mean of later ones.
    """

    first_token_s: float
    output_token_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the objective of a text such as "ttft:2000 tpot:40", in milliseconds.

        Raises InvalidValueError.
        """
        try:
            pairs = [each.split(":") for each in text.split()]
            given = dict(pairs)
            limits = [float(given[name]) / 1000 for name in ("ttft", "tpot")]
            if len(pairs) == len(limits) and all(0 < each < math.inf for each in limits):
                return cls(*limits)
        except (KeyError, ValueError):
            pass
        raise InvalidValueError("slo", text, "milliseconds such as ttft:2000 tpot:40")
