"""The latencies that requests should have: the service level objective of `--slo`."""

from __future__ import annotations

from typing import NamedTuple, Self

from specdec.types.errors import InvalidValueError

_LEAST_MS, _MOST_MS = 1, 3_600_000


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
            limits = [float(given[name]) for name in ("ttft", "tpot")]
            if len(pairs) == len(limits) and all(_LEAST_MS <= each <= _MOST_MS for each in limits):
                return cls(*(each / 1000 for each in limits))
        except (KeyError, ValueError):
            pass
        limit = f"from {_LEAST_MS} to {_MOST_MS} such as ttft:2000 tpot:40"
        raise InvalidValueError("slo", text, f"ttft and tpot in milliseconds, {limit}")
