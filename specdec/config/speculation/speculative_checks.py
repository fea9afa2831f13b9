"""Checks of the fields of a SpeculativeConfig; see there.

All raise InvalidValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specdec.config.speculation.method_config import MethodConfig
from specdec.config.speculation.methods import METHODS
from specdec.types.drafts.draft_length import LengthRule, LengthSchedule
from specdec.types.drafts.draft_tree import MAX_TREE_NODES
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, SpeculationOptions
from specdec.types.validation import require_range

DEFAULT_BATCH_BUDGET_MAX = 8
_TREE_SIZE = "speculative_config.num_draft_tree_tokens"


def check_tree_choices(
    choices: Sequence[Sequence[int]], num_nodes: int, num_speculative_tokens: int
) -> None:
    """Check the tree that medusa_choices fix; num_nodes: num_draft_tree_tokens."""
    if not choices:
        return
    if num_nodes != len(choices):
        limit = f"left out or {len(choices)}, the number of medusa_choices"
        raise InvalidValueError(_TREE_SIZE, num_nodes, limit)
    depth = max(map(len, choices))
    if depth > num_speculative_tokens:
        name = "speculative_config.num_speculative_tokens"
        limit = f"at least {depth}, the length of the longest path in medusa_choices"
        raise InvalidValueError(name, num_speculative_tokens, limit)
    if num_nodes <= num_speculative_tokens:
        limit = f"more than num_speculative_tokens ({num_speculative_tokens}) paths, or left out"
        raise InvalidValueError("speculative_config.medusa_choices", [*map(list, choices)], limit)


def require_tree_drafter(num_nodes: int, drafters: Sequence[MethodConfig]) -> None:
    """Check that some method drafts trees of num_draft_tree_tokens."""
    if not any(each.drafts_trees for each in drafters):
        names = " or ".join(each for each in METHODS if METHODS[each].drafts_trees)
        limit = f"0 unless method, first or fallback is {names}"
        raise InvalidValueError(_TREE_SIZE, num_nodes, limit)


def check_tree_size(
    num_nodes: int, num_speculative_tokens: int, *, is_table: bool, has_budget: bool
) -> None:
    """Check num_draft_tree_tokens. is_table: whether policy is table; has_budget: batch_budget."""
    if is_table:
        limit = "0 with policy table, whose rows are lengths of chains"
        raise InvalidValueError(_TREE_SIZE, num_nodes, limit)
    if has_budget:
        limit = "0 with batch_budget, which divides the tokens of chains"
        raise InvalidValueError(_TREE_SIZE, num_nodes, limit)
    if not num_speculative_tokens < num_nodes <= MAX_TREE_NODES:
        least = f"above num_speculative_tokens ({num_speculative_tokens})"
        limit = f"0, or {least} and at most {MAX_TREE_NODES}"
        raise InvalidValueError(_TREE_SIZE, num_nodes, limit)


def check_policy(policy: str | None, names: Sequence[str]) -> None:
    """Check the name of a policy; None leaves it out."""
    if policy not in (None, *names):
        limit = f"one of {', '.join(names)}, or left out"
        raise InvalidValueError("speculative_config.policy", policy, limit)


def check_options(**options: Any) -> None:
    """Check the fields of SpeculationOptions for requests that leave them out."""
    try:
        SpeculationOptions(**options)
    except InvalidValueError as error:
        field = error.field.replace("speculation.", "speculative_config.")
        raise InvalidValueError(field, error.value, error.limit) from None


def check_schedule(
    rows: tuple[tuple[int, int, int], ...], num_speculative_tokens: int, *, is_wanted: bool
) -> None:
    """Check the rows of policy table. is_wanted: whether it is the policy."""
    name = "speculative_config.num_speculative_tokens_per_batch_size"
    if bool(rows) != is_wanted:
        raise InvalidValueError(name, rows, "given if policy is table, and left out otherwise")
    if rows and LengthSchedule(rows).most > num_speculative_tokens:
        limit = f"rows of at most num_speculative_tokens ({num_speculative_tokens})"
        raise InvalidValueError(name, rows, limit)


def check_adaptive_length(
    rule: LengthRule, num_speculative_tokens: int, *, is_wanted: bool
) -> None:
    """Check the rule of adaptive_length. is_wanted: whether that is true."""
    if is_wanted:
        name = "speculative_config.num_speculative_tokens"
        require_range(name, num_speculative_tokens, rule.min_tokens, rule.max_tokens)
        return
    for name, value in asdict(rule).items():
        if value != getattr(LengthRule, name):
            field = f"speculative_config.adaptive_length_{name.removesuffix('_tokens')}"
            raise InvalidValueError(field, value, "left out unless adaptive_length is true")


def check_budget(most: int, num_speculative_tokens: int, *, is_wanted: bool) -> None:
    """Check batch_budget_max. is_wanted: whether batch_budget is true."""
    name = "speculative_config.batch_budget_max"
    if is_wanted:
        require_range(name, most, num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS)
    elif most != DEFAULT_BATCH_BUDGET_MAX:
        raise InvalidValueError(name, most, "left out unless batch_budget is true")
