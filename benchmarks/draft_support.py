"""Acceptance lost when drafts are drawn from the most likely tokens only.

Rejection sampling accepts a draft token with probability sum over x of min(p(x), q(x)) (Leviathan
et al. 2023, theorem 3.5). Here q is the draft distribution truncated to its n most likely tokens.
The sum is computed, not sampled, at each position of given texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.reference.forward_batch import Chunk, ModelInput
from specdec.worker import DraftModelRunner, TargetModelRunner

LISTED = (8, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Text:
    """Prompt and its generated continuation."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int]


@dataclass(frozen=True)
class Support:
    """Expected acceptance of one draft. acceptance: mean for each of LISTED, then untruncated."""

    draft: str
    temperature: float
    num_positions: int
    acceptance: tuple[float, ...]


@torch.inference_mode()
def expected_acceptance(
    draft_name: str,
    temperature: float,
    target: TargetModelRunner,
    draft: DraftModelRunner,
    texts: Sequence[Text],
) -> Support:
    """Compute the expected acceptance over texts. Overwrites the first blocks of both KV pools."""
    sums = []
    for text in texts:
        target_probs = (_output_logits(target, text) / temperature).double().softmax(1)
        draft_probs = (_output_logits(draft, text) / temperature).double().softmax(1)
        sums.append(_overlaps(target_probs, draft_probs))
    overlaps = torch.cat(sums)
    means = tuple(round(value, 5) for value in overlaps.mean(0).tolist())
    return Support(draft_name, temperature, len(overlaps), means)


def _overlaps(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return [num_positions, len(LISTED) + 1] from two arguments of [num_positions, vocab_size]."""
    best = draft_probs.topk(max(LISTED))
    wanted = target_probs.gather(1, best.indices)
    columns = []
    for count in LISTED:
        listed = best.values[:, :count]
        listed = listed / listed.sum(1, keepdim=True)
        columns.append(torch.minimum(wanted[:, :count], listed).sum(1))
    columns.append(torch.minimum(target_probs, draft_probs).sum(1))
    return torch.stack(columns, dim=1)


def _output_logits(runner: TargetModelRunner | DraftModelRunner, text: Text) -> Tensor:
    """Return the logits that predict each output token, [num_output_tokens, vocab_size]."""
    token_ids = [*text.prompt_ids, *text.output_ids]
    num_blocks = -(-len(token_ids) // runner.block_size)
    batch = ModelInput([Chunk(token_ids, 0, range(num_blocks))], runner.block_size)
    hidden = runner.model(batch, runner.kv_cache)
    scored = hidden[len(text.prompt_ids) - 1 : -1]
    return runner.model.compute_logits(scored)[:, : runner.vocab_size].float()
