"""Steps that a target runs before it serves, so that the first request is not slow."""

from __future__ import annotations

from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.target_model_runner import TargetModelRunner

_NUM_DRAFTS = 2
_NUM_TOKENS_AFTER = 3 + _NUM_DRAFTS
"""Tokens after the prompt: the decoded one and the next, drafts, and one of the target."""


def warm_up_target(runner: TargetModelRunner, num_tokens: int, max_model_len: int) -> None:
    """Run a prefill of `num_tokens` and a decode.

    The prefill is shorter where a sequence of `max_model_len` tokens, at which the block tables
    end, has no room for the rest. A head drafts after both, if it can have room. With a device
    both run there and by the host's operators. Its kernels for penalties are compiled, and its
    counts of tokens allocated. Overwrites the first blocks of the pool, which must be unused.
    """
    has_drafts = runner.drafter is not None and max_model_len > _NUM_TOKENS_AFTER
    num_next = _NUM_DRAFTS if has_drafts else 0
    drafting = RowDrafting(num_next=num_next, num_lookup=num_next)
    num_after = _NUM_TOKENS_AFTER if has_drafts else 1  # at least the decoded token
    num_tokens = min(num_tokens, max_model_len - num_after)
    num_blocks = -(-(num_tokens + num_after) // runner.block_size)
    token_ids = (0,) * num_tokens
    rules = SamplingRules(top_p=0.9, presence_penalty=0.1, logprobs=1)
    admission = SequenceAdmission(-1, num_tokens, rules, token_ids)
    table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
    prefill = StepRow(-1, 0, token_ids, 0, True, drafting)
    decode = StepRow(-1, num_tokens, (0,), 0, True, drafting)
    runs = [runner.execute]
    if runner.device_steps is not None:
        runs.append(runner.execute_on_host)
    for run in runs:
        run(StepInput(-1, (), (admission,), (table,), (prefill,)))
        run(StepInput(-1, (), (), (), (decode,)))
        runner.execute(StepInput(-1, (-1,), (), (), ()))
