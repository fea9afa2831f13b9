"""Policy factory: makes the configured policy, with the profiled costs of the loaded models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_profiler import CostProfiler, with_drafting, with_engine
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.ranks import DraftWorker, Target
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

logger = logging.getLogger(__name__)

MeasureDraft = Callable[[Callable[[DraftWorker], CostTable | None]], CostTable | None]
"""Passes the draft worker to a function and returns its result; None if the worker fails."""

MeasureEngine = Callable[[int, float], CostTable]
"""Returns an engine's own seconds of steps with up to a number of draft tokens. The second argument
is the budget of the measurement, in seconds."""

_ENGINE_BUDGET_S = 1.0
_VERIFICATION_BUDGET_S = 2.0
_LEFT_OUT_BUDGET_S = 1.0
_DRAFTING_BUDGET_S = 1.0


@dataclass(frozen=True)
class ProfiledModels:
    """Loaded models whose steps are measured, before they have sequences.

    measure_engine: measures the engine's own part of a step. measure_draft: passes the draft worker
    to the profiler; None, like draft_limits, without a draft model. text, draft_text: see
    CostProfiler.
    """

    target: Target
    measure_engine: MeasureEngine
    measure_draft: MeasureDraft | None = None
    draft_limits: DraftLimits | None = None
    text: tuple[int, ...] = ()
    draft_text: tuple[int, ...] = ()


def make_policy(
    control: SpeculationControl,
    config: EngineConfig,
    models: ProfiledModels,
    is_drafter_available: Callable[[], bool] = lambda: True,
) -> SpeculationPolicy | None:
    """Return the policy; None where nothing drafts. Goodput first profiles for 3 to 6 seconds.

    control: the present settings.
    """
    if (speculation := config.speculation) is None:
        return None
    choosers: Mapping[str | None, GoodputChooser] = {}
    if speculation.chosen_policy == "goodput":
        costs = measure_costs(speculation, config, models, divides_slots=speculation.divides_slots)
        choosers = _choosers(speculation, costs, config.most_padding_tokens)
    return SpeculationPolicy(
        control,
        time.monotonic,
        schedule=speculation.length_schedule,
        choosers=choosers,
        length_rule=speculation.length_rule,
        num_tree_tokens=speculation.num_draft_tree_tokens,
        has_fixed_trees=bool(speculation.head and speculation.head.tree_choices),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        is_drafter_available=is_drafter_available,
        # A head, too, has no draft for the first step after drafts were off.
        catches_up=any(each.place is not DraftPlace.ENGINE for each in speculation.drafters),
        ahead_choices=speculation.ahead_choices,
    )


def _choosers(
    speculation: SpeculativeConfig,
    costs: Mapping[str | None, MethodCosts],
    most_padding_tokens: int,
) -> dict[str | None, GoodputChooser]:
    divides_slots = speculation.divides_slots
    return {
        name: GoodputChooser(each.model(most_padding_tokens), divides_slots=divides_slots)
        for name, each in costs.items()
    }


class MethodCosts(NamedTuple):
    """Costs of the steps of a method.

    whole: with drafts. ahead, drafting, verification: as in CostModel.
    """

    whole: CostTable
    ahead: CostTable | None = None
    drafting: CostTable | None = None
    verification: CostTable | None = None

    def model(self, most_padding_tokens: int) -> CostModel:
        """Return a model of these costs, which has observed no step."""
        costs = self.whole, self.ahead, self.drafting
        return CostModel(
            *costs, verification=self.verification, most_padding_tokens=most_padding_tokens
        )


def measure_costs(
    speculation: SpeculativeConfig,
    config: EngineConfig,
    models: ProfiledModels,
    *,
    divides_slots: bool = False,
) -> dict[str | None, MethodCosts]:
    """Return the seconds of steps with each method, and with all together (None).

    divides_slots: whether to measure what draft tokens that are left out save.
    """
    chosen = speculation.num_speculative_tokens, speculation.num_draft_tree_tokens
    rule = speculation.length_rule
    most = max(*chosen, rule.max_tokens if rule else 0)
    profiler = CostProfiler(
        config, most, time.perf_counter, text=models.text, draft_text=models.draft_text
    )
    # Beyond the longest chain the table grows with the rows, a little faster than the engine does.
    engine = models.measure_engine(min(most, MAX_NUM_SPECULATIVE_TOKENS), _ENGINE_BUDGET_S)
    num_held = most if speculation.holds_drafts else 0

    def verification(profiler: CostProfiler, budget_s: float) -> CostTable:
        costs = profiler.verification(models.target, budget_s)
        overlaps = config.async_scheduling
        return with_engine(costs, engine, overlaps=overlaps, num_held_drafts=num_held)

    tables = _costs_of_target(speculation, profiler, verification, divides_slots=divides_slots)
    limits, budget_s = models.draft_limits, _DRAFTING_BUDGET_S
    if models.measure_draft is not None and limits is not None:
        drafting = models.measure_draft(lambda worker: profiler.drafting(worker, limits, budget_s))
        of_lookups = tables[DraftPlace.ENGINE].whole
        tables[DraftPlace.DRAFT_WORKER] = _costs_with_worker(of_lookups, drafting)
    main = tables.get(_main_place(speculation)) or tables[DraftPlace.ENGINE]
    logger.info("ms of a step: %s", main.whole.describe())
    by_method: dict[str | None, MethodCosts] = {None: main}
    by_method |= {each.name: tables.get(each.place, main) for each in speculation.drafters}
    return by_method


def _costs_of_target(
    speculation: SpeculativeConfig,
    profiler: CostProfiler,
    verification: Callable[[CostProfiler, float], CostTable],
    *,
    divides_slots: bool,
) -> dict[DraftPlace, MethodCosts]:
    """Return the costs of steps without a draft worker. verification: measures for some seconds."""
    on_ranks = speculation.rank_drafters
    tables, undrafted = dict[DraftPlace, MethodCosts](), None
    if on_ranks != speculation.drafters:
        undrafted = verification(profiler, _VERIFICATION_BUDGET_S)
        tables[DraftPlace.ENGINE] = MethodCosts(undrafted)
    elif divides_slots:
        undrafted = verification(profiler, _LEFT_OUT_BUDGET_S)
    if on_ranks:
        whole = verification(replace(profiler, with_head=True), _VERIFICATION_BUDGET_S)
        tables[DraftPlace.TARGET] = MethodCosts(whole, verification=undrafted)
    return tables


def _costs_with_worker(of_lookups: CostTable, drafting: CostTable | None) -> MethodCosts:
    if drafting is None:
        return MethodCosts(of_lookups)
    whole = with_drafting(of_lookups, drafting)
    return MethodCosts(whole, of_lookups, drafting, verification=of_lookups)


def _main_place(speculation: SpeculativeConfig) -> DraftPlace:
    """Return the place of the first model, which drafts for most sequences; else that of lookups.

    A model after another drafts only where that one has nothing.
    """
    places = (each.place for each in speculation.drafters)
    models = (each for each in places if each is not DraftPlace.ENGINE)
    return next(models, DraftPlace.ENGINE)
