"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.config.speculation.head_methods import Eagle3Config
from specdec.config.speculation.methods import trained_drafters
from specdec.models.heads.formats.dflash import MarkovKind
from specdec.types.errors import InvalidValueError
from specdec.types.validation import check_types, require_choice, require_range

LossName = Literal["kl", "ce", "tv", "lk_hybrid", "coupling", "dspark"]
PositionWeights = Literal["decay", "d_pace"]
OptimizerName = Literal["adamw", "muon"]
Precision = Literal["float32", "bfloat16"]
WeightDtype = Literal["float32", "bfloat16", "float16"]
ExportLayout = Literal["published", "packed"]

_LARGEST = 2**31 - 1
_COUNTS = (
    "num_epochs",
    "batch_tokens",
    "max_anchors",
    "max_held_out_samples",
    "evaluate_every",
    "patience",
    "checkpoint_every",
)


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a training run: beside samples and target, all that decides the weights.

    method: one for which `specdec.training.drafters` has a drafter.
    depth: draft tokens after each position that are trained. A draft model is trained on the next
        token alone, and evaluated with this many.
    num_layers: decoder layers, where a method may have any number; None for its default.
    markov_rank, markov_head: of dspark's Markov head, its rank and kind; None for the default.
    lora_rank: of an adapter, which is trained of a head that stays as it is; None to train all.
    num_epochs: passes over the samples; training ends earlier by `patience`.
    batch_tokens: tokens of prompts and answers in a step; a longer sample fills a separate step.
    max_anchors: positions of a sample after which a step drafts, drawn at random if it has more.
    learning_rate: the peak, after a linear warm-up over `warmup` (a share of all steps) and before
        a cosine decay to a tenth.
    clip_norm: largest norm of the gradient.
    loss: see `specdec.training.losses`. position_weights, decay: see `position_weights` there.
    precision: of the drafter's matrix products; weights, losses and the optimizer are float32.
    held_out: share of the samples to evaluate on, at most `max_held_out_samples` of them.
    evaluate_every: steps between two evaluations of the held-out acceptance length.
    patience: evaluations without a new best after which training ends.
    checkpoint_every: steps between two checkpoints, the most that an interruption loses.
    export_dtype: of the weights that are exported.
    export_layout: the published one, or that of `specdec.models.packed`.
    """

    method: str = Eagle3Config.name
    seed: int = 0
    depth: int = 4
    num_layers: int | None = None
    markov_rank: int | None = None
    markov_head: MarkovKind | None = None
    lora_rank: int | None = None
    num_epochs: int = 4
    batch_tokens: int = 2048
    max_anchors: int = 512
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    loss: LossName = "lk_hybrid"
    position_weights: PositionWeights = "decay"
    decay: float = 0.8
    precision: Precision = "float32"
    held_out: float = 0.02
    max_held_out_samples: int = 100
    evaluate_every: int = 200
    patience: int = 10
    checkpoint_every: int = 50
    export_dtype: WeightDtype = "float16"
    export_layout: ExportLayout = "published"

    def __post_init__(self) -> None:
        check_types(self)
        require_choice("loss", self.loss, get_args(LossName))
        require_choice("position_weights", self.position_weights, get_args(PositionWeights))
        require_choice("optimizer", self.optimizer, get_args(OptimizerName))
        require_choice("precision", self.precision, get_args(Precision))
        require_choice("export_dtype", self.export_dtype, get_args(WeightDtype))
        require_choice("export_layout", self.export_layout, get_args(ExportLayout))
        require_range("seed", self.seed, 0, _LARGEST)
        require_range("depth", self.depth, 1, 16)
        for name in ("num_layers", "markov_rank", "markov_head"):
            self._check_is_read(name)
        require_range("num_layers", self.num_layers, 1, 64)
        require_range("markov_rank", self.markov_rank, 1, 4096)
        require_choice("markov_head", self.markov_head, get_args(MarkovKind))
        if self.lora_rank is not None:
            require_range("lora_rank", self.lora_rank, 1, 256)
            require_choice("export_layout", self.export_layout, ("published",))
        for name in _COUNTS:
            require_range(name, getattr(self, name), 1, _LARGEST)
        require_range("learning_rate", self.learning_rate, 1e-9, 1)
        require_range("warmup", self.warmup, 0, 1)
        require_range("weight_decay", self.weight_decay, 0, 1)
        require_range("clip_norm", self.clip_norm, 1e-6, 1e6)
        require_range("decay", self.decay, 0.01, 1)
        require_range("held_out", self.held_out, 1e-6, 0.5)

    def _check_is_read(self, name: str) -> None:
        """Reject a field that only some methods read if another method is trained."""
        methods = [
            method for method, each in reversed(trained_drafters().items()) if name in each.sizes
        ]
        if getattr(self, name) is not None and self.method not in methods:
            limit = f"left out: it is of {', '.join(methods)}, and the method is {self.method}"
            raise InvalidValueError(name, getattr(self, name), limit)
