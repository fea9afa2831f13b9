"""Optimizers of a drafter, and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specdec.training.data.config import TrainingConfig

_FINAL_SHARE = 0.1


def learning_rate(config: TrainingConfig, step: int, num_steps: int) -> float:
    """Return the rate of a step: a linear warm-up, then a cosine decay to a tenth of the peak."""
    num_warmup = max(1, round(config.warmup * num_steps))
    if step < num_warmup:
        return config.learning_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


class Optimizers:
    """AdamW (Loshchilov and Hutter 2019), or Muon (Jordan 2024) for the matrices beside it.

    Muon orthogonalizes the updates of hidden matrices. Norms, embeddings and output heads have
    AdamW's: their rows belong to tokens, or to one probability.
    """

    def __init__(self, config: TrainingConfig, module: nn.Module) -> None:
        self._config = config
        named = [pair for pair in module.named_parameters() if pair[1].requires_grad]
        matrices = [each for name, each in named if each.ndim == 2 and not is_outer(name)]
        vectors = [each for _, each in named if each.ndim < 2]
        outer = [each for name, each in named if each.ndim == 2 and is_outer(name)]
        rate, decay = config.learning_rate, config.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = []
        if config.optimizer == "muon" and matrices:
            # Scaled to the size of AdamW's updates, so that one rate suits both.
            muon = torch.optim.Muon(
                matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
            self._optimizers.append(muon)
            matrices = []
        groups = [
            {"params": [*matrices, *outer], "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [each for each in groups if each["params"]]
        has_kernel = all(each.is_cuda or each.is_cpu for _, each in named)
        adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=has_kernel or None)
        self._optimizers.append(adamw)
        self._parameters = [each for _, each in named]

    def step(self, step: int, num_steps: int) -> None:
        """Update the parameters by their gradients, and clear these."""
        nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm)
        rate = learning_rate(self._config, step, num_steps)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by names that `load` accepts."""
        return {
            f"{place}.{parameter}.{name}": value
            for place, optimizer in enumerate(self._optimizers)
            for parameter, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of `tensors`, which may be on another device."""
        for place, optimizer in enumerate(self._optimizers):
            content = optimizer.state_dict()
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                owner, parameter, name = key.split(".")
                if int(owner) == place:
                    state.setdefault(int(parameter), {})[name] = value
            optimizer.load_state_dict({**content, "state": state})


def is_outer(name: str) -> bool:
    """Return whether a matrix is an embedding or an output head."""
    return "_head" in name or "embedding" in name
