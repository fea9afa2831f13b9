"""Drafting methods that benchmarks compare, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.workloads import MODEL, NO_METHOD
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_profiler import CostProfiler
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.ranks import Target

NUM_SPECULATIVE_TOKENS = 7

_MEASURING_BUDGET_S = 2.0


@dataclass(frozen=True)
class Method:
    """Drafting method. is_automatic: a policy decides in each step how much to draft."""

    config: SpeculativeConfig | None
    is_automatic: bool = False

    def policy(self, target: Target, config: EngineConfig) -> SpeculationPolicy | None:
        """Return the policy that decides draft lengths; None drafts as configured in each step.

        The policy is goodput; it first measures steps of the idle `target`.
        """
        if not self.is_automatic or self.config is None:
            return None
        rule, most = self.config.length_rule, self.config.num_speculative_tokens
        most = max(most, rule.max_tokens if rule else 0)
        profiler = CostProfiler(config, most, time.perf_counter)
        table = profiler.verification(target, _MEASURING_BUDGET_S).steps
        return SpeculationPolicy(
            self.config.control,
            time.monotonic,
            choosers={None: GoodputChooser(CostModel(table))},
            length_rule=rule,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )


# Suffix decoding keeps no earlier answers, because the benchmarks repeat their prompts.
_MAKERS: Mapping[str, Callable[[int], Method]] = MappingProxyType(
    {
        NO_METHOD: lambda count: Method(None),
        "ngram": lambda count: Method(SpeculativeConfig.of("ngram", count)),
        "suffix": lambda count: Method(
            SpeculativeConfig.of("suffix", count, suffix_decoding_max_cached_requests=0)
        ),
        "lookahead": lambda count: Method(SpeculativeConfig.of("lookahead", count)),
        "draft_model": lambda count: Method(
            SpeculativeConfig.of("draft_model", count, quantization="int8")
        ),
        "suffix+draft_model": lambda count: Method(
            SpeculativeConfig.of(
                "draft_model",
                count,
                quantization="int8",
                first="suffix",
                suffix_decoding_max_cached_requests=0,
            )
        ),
        "eagle3": lambda count: Method(
            SpeculativeConfig.of("eagle3", count, model=f"{MODEL}-eagle3")
        ),
        "auto": lambda count: Method(
            SpeculativeConfig.of(
                "suffix",
                count,
                adaptive_length=True,
                adaptive_length_max=max(count, SpeculativeConfig.adaptive_length_max),
                suffix_decoding_max_cached_requests=0,
            ),
            is_automatic=True,
        ),
    }
)

METHODS: tuple[str, ...] = tuple(_MAKERS)


def make_method(name: str, num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS) -> Method:
    """Return the method called `name`, one of METHODS, with that many draft tokens."""
    return _MAKERS[name](num_speculative_tokens)
