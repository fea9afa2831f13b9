"""Mixtures of experts: by kernels that run the experts of all tokens at once, or one by one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.experts import Routes, RoutingRule, route
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import Experts
from specdec.models.layers.expert_stack import stack_experts
from specdec.models.layers.linear import ColumnParallelLinear, WeightPart
from specdec.models.layers.mlp import MLP
from specdec.models.weights.checkpoint import CheckpointReader


class SparseMLP(nn.Module):
    """A mixture of experts (Shazeer et al. 2017), divided over the ranks as `Experts` describes.

    The router is not quantized, and its logits are float32 with every data type: a small error of
    them would select another expert. transformers rounds those of some families (Mixtral, Qwen,
    GPT-OSS), not those of DeepSeek, GLM and ERNIE; in 16 bits its choice differs in near ties.

    stack: the experts of this rank for Triton's kernels, which add a token's results from the best
    expert on. None where torch runs the experts one by one, and adds them in their order; the host
    then reads which ones the tokens have.
    """

    def __init__(
        self, config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
    ) -> None:
        """prefix: of the tensors; see `TensorNames.mixture_prefix`."""
        super().__init__()
        experts, names, hidden_size = config.experts, config.traits.names, config.hidden_size
        assert experts is not None, "the model has no experts"
        self.config, self.group, self.backend = experts, group, reader.backend
        exact = replace(reader, quantization=None)
        name, count = f"{prefix}.{names.router}", experts.count
        rows = WeightPart(name, count, range(count), has_bias=experts.has_bias)
        self.router = ColumnParallelLinear(exact, hidden_size, [rows])
        reader.num_elements_read = exact.num_elements_read
        self.choice_bias = _read_choice_bias(experts, reader, f"{prefix}.{names.choice_bias}")
        self.rule = _rule(experts)
        self.shared: nn.Module | None = None
        if size := experts.shared_size:
            self.shared = MLP(config, reader, f"{prefix}.{names.shared}", group, size)
            if experts.has_shared_gate:
                gate = reader.read(f"{prefix}.{names.shared_gate}.weight", (1, hidden_size))
                self.shared = GatedExpert(self.shared, gate)
        self.own = experts.shard(group.rank, group.size).experts
        sharing = TensorParallelGroup() if experts.is_divided_by_expert else group
        own, size = f"{prefix}.{names.experts}", experts.intermediate_size
        self.experts = nn.ModuleList(
            MLP(config, reader, f"{own}.{index}", sharing, size, is_routed=True)
            for index in self.own
        )
        can_stack = reader.backend.is_triton and not experts.scales_inputs
        self.stack = stack_experts(list(self.experts)) if can_stack else None

    @property
    def fits_graphs(self) -> bool:
        """Return whether it runs in fixed shapes, without a value that the host reads."""
        if self.config.scales_inputs:
            return False
        return self.stack is not None or (self.backend.is_triton and not self.own)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return [T, hidden_size], plus the residual if given; both inputs: [T, hidden_size]."""
        if self.fits_graphs:
            return self._run_grouped(x, residual)
        routes = route(self.router.in_float32(x), self.choice_bias, self.rule)
        mixed = torch.zeros_like(x) if self.shared is None else self.shared(x, None)
        mixed = self.group.all_reduce(self._add_one_by_one(x, routes, mixed))
        return mixed if residual is None else residual + mixed

    def _add_one_by_one(self, x: Tensor, routes: Routes, mixed: Tensor) -> Tensor:
        """Add the results of this rank's experts to `mixed` in place, and return it."""
        weights, chosen = routes.weights.to(x.dtype), routes.chosen
        for index in chosen.unique().tolist():  # ascending
            if index not in self.own:
                continue
            rows, places = (chosen == index).nonzero(as_tuple=True)
            expert, scale = self.experts[index - self.own.start], weights[rows, places, None]
            if self.config.scales_inputs:
                mixed.index_add_(0, rows, expert(x[rows] * scale, None))
            else:
                mixed.index_add_(0, rows, expert(x[rows], None) * scale)
        return mixed

    def _run_grouped(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return what `forward` does, by kernels; one rank alone adds the residual with them."""
        from specdec.kernels.triton import experts as kernels  # imports Triton

        is_alone = self.group.size == 1
        base = residual if is_alone else None
        if self.shared is not None:
            base = self.shared(x, base)
        mixed = torch.zeros_like(x) if base is None else base
        if self.stack is not None:
            routes = kernels.route(self.router.in_float32(x), self.choice_bias, self.rule)
            invariant = self.backend is KernelBackend.INVARIANT
            mixed = kernels.run_experts(
                x, routes, self.stack, self.own.start, base, invariant=invariant
            )
        if is_alone:
            return mixed
        mixed = self.group.all_reduce(mixed)
        return mixed if residual is None else residual + mixed


class LatentSparseMLP(SparseMLP):
    """A mixture whose routed experts read latents, and add latents (Nemotron 3 Super)."""

    def __init__(
        self, config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
    ) -> None:
        """See SparseMLP; every rank has the projections to latents and back."""
        super().__init__(config, reader, prefix, group)
        names, hidden_size, size = config.traits.names, config.hidden_size, self.config.latent_size
        assert size is not None, "the mixture has no latents"
        to = WeightPart(f"{prefix}.{names.to_latents}", size, range(size))
        back = WeightPart(f"{prefix}.{names.from_latents}", hidden_size, range(hidden_size))
        self.to_latents = ColumnParallelLinear(reader, hidden_size, [to])
        self.from_latents = ColumnParallelLinear(reader, size, [back])

    def _add_one_by_one(self, x: Tensor, routes: Routes, mixed: Tensor) -> Tensor:
        """See SparseMLP; ranks project their sums of latents, which the caller adds."""
        latents: Tensor = self.to_latents(x)
        found = super()._add_one_by_one(latents, routes, torch.zeros_like(latents))
        return mixed.add_(self.from_latents(found))


def _read_choice_bias(config: Experts, reader: CheckpointReader, name: str) -> Tensor | None:
    """Return what joins the scores of experts in choices, [count] float32; None without it."""
    if config.routing is None or not config.routing.has_bias:
        return None
    shape = (1, config.count) if config.routing.is_bias_a_row else (config.count,)
    return reader.read(name, shape, dtype=torch.float32).flatten().clone()


class GatedExpert(nn.Module):
    """An expert whose result is multiplied by a sigmoid of the token."""

    def __init__(self, expert: nn.Module, gate: Tensor) -> None:
        """gate: [1, hidden_size]."""
        super().__init__()
        self.expert, self.gate = expert, gate

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        output: Tensor = self.expert(x, None) * (x @ self.gate.t()).sigmoid()
        return output if residual is None else residual + output


def _rule(config: Experts) -> RoutingRule:
    """Return the rule of a mixture for the kernels."""
    rule, routing = RoutingRule(config.num_per_token, config.normalizes), config.routing
    if routing is None:
        return rule
    return replace(
        rule,
        is_sigmoid=routing.is_sigmoid,
        num_groups=routing.num_groups,
        num_chosen_groups=routing.num_chosen_groups,
        scale=routing.scale,
        adds_two_best=routing.adds_two_best,
    )
