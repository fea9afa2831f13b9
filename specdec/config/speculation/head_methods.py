"""Methods that draft with a head on the target's hidden states: all that is known of each by name.

A new method is a subclass of `HeadMethodConfig` in `HEAD_METHODS`, the module of its format, and
that of its network: docs/methods.md shows all three. The entry names the code of other layers as
"module:attribute", which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.config.speculation.method_config import (
    DraftPlace,
    MethodConfig,
    TrainedDrafter,
    within,
)
from specdec.types.drafts.static_tree import StaticTree
from specdec.types.errors import InvalidValueError

_FORMATS = "specdec.models.heads.formats"
_NETWORKS = "specdec.models.heads.networks"
_DRAFTERS = "specdec.training.drafters"


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """Base of the methods that draft with a head on the target's hidden states.

    head_format: the published layouts, a `HeadFormat` (`specdec.models.heads.formats`).
    network: the class of a `DraftHead` (`specdec.models.heads.networks`), called with a shape, a
        CheckpointReader and a TargetRank. native_network: returns the same head on the kernels for
        CPUs, of one that `network` has made; None where it has none.
    grows_trees: whether a head with attention also runs the tokens of a tree level by level, on a
        GPU as graphs.
    drafts_by_depth: whether its logits may depend on the depth alone, so that trees grow best first
        on a GPU, as graphs; those of DSpark do not where its files link tokens.
    has_layers_of_model: whether its passes have the layers of a whole model.
    model: the head's checkpoint, a directory or a Hub id; None for the target's own.
    quantization: how the head's matrices are held; None keeps the model's dtype.
    speculative_token_map: JSON file with the target's ids of the tokens that the head may draft,
        on every node; None for all that it has (`specdec.models.drafters.token_map`).
    """

    head_format: ClassVar[str]
    network: ClassVar[str]
    native_network: ClassVar[str | None] = None
    grows_trees: ClassVar[bool] = False
    drafts_by_depth: ClassVar[bool] = False
    has_layers_of_model: ClassVar[bool] = False
    proposer = "specdec.speculation.proposers.target_head:TargetHeadProposer"
    place = DraftPlace.TARGET
    drafts_trees = True

    model: str | None = None
    quantization: QuantizationMethod | None = None
    speculative_token_map: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model and not self.is_in_target:
            kind = "draft model" if self.has_layers_of_model else "head"
            limit = f"the directory or Hub id of the {kind} that method {self.name} drafts with"
            raise InvalidValueError("speculative_config.model", self.model, limit)
        require_quantization(self.quantization, "speculative_config.quantization")

    @property
    def window(self) -> int | None:
        """The attention window of the head's layers; None for that of its files."""
        return None

    @property
    def tree_choices(self) -> tuple[tuple[int, ...], ...]:
        """The shape of its trees, as in `StaticTree.of_choices`; none where each is fitted."""
        return ()

    @property
    def grows_best_first(self) -> bool:
        """Return whether a GPU may have graphs in which its trees grow best first."""
        return self.drafts_by_depth and not self.tree_choices


@dataclass(frozen=True)
class AttentionHeadConfig(HeadMethodConfig):
    """Base of the heads with attention, whose KV is one more layer in the target's blocks.

    draft_window: attention window of the head's layers in tokens; None for that of its files.
    """

    writes_kv = True
    reads_tokens = True

    draft_window: int | None = within(None, 1, 2**24)

    @property
    def window(self) -> int | None:
        """`draft_window`."""
        return self.draft_window


@dataclass(frozen=True)
class MedusaConfig(HeadMethodConfig):
    """Medusa heads: each predicts the token at one distance from the target's last hidden state.

    medusa_choices: shape of its trees, as paths of ranks among a head's best tokens: [0, 1] is the
        second best token of the second head, after the best one of the first. The order is free.
        Without choices each tree has the shape with the most expected accepted tokens.
    """

    name = "medusa"
    head_format = f"{_FORMATS}.medusa:MEDUSA"
    network = f"{_NETWORKS}.medusa:MedusaHeads"
    native_network = f"{_NETWORKS}.native_medusa:on_native_kernels"
    drafts_by_depth = True
    trained = TrainedDrafter(f"{_DRAFTERS}.medusa:MedusaDrafter")

    medusa_choices: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        StaticTree.of_choices(self.medusa_choices, "speculative_config.medusa_choices")

    @property
    def tree_choices(self) -> tuple[tuple[int, ...], ...]:
        """`medusa_choices`."""
        return self.medusa_choices


@dataclass(frozen=True)
class MlpSpeculatorConfig(HeadMethodConfig):
    """MLP speculator: a small recurrent network over the target's last hidden state."""

    name = "mlp_speculator"
    other_names = ("mlp",)
    head_format = f"{_FORMATS}.mlp_speculator:MLP_SPECULATOR"
    network = f"{_NETWORKS}.mlp_speculator:MlpSpeculator"
    trained = TrainedDrafter(f"{_DRAFTERS}.mlp_speculator:MlpSpeculatorDrafter")


@dataclass(frozen=True)
class HydraConfig(HeadMethodConfig):
    """Hydra heads: as Medusa's, and each also reads the tokens drafted before its own."""

    name = "hydra"
    head_format = f"{_FORMATS}.hydra:HYDRA"
    network = f"{_NETWORKS}.hydra:HydraHeads"


@dataclass(frozen=True)
class EagleConfig(AttentionHeadConfig):
    """EAGLE-1 and EAGLE-2: a decoder layer on tokens and the target's last hidden states."""

    name = "eagle"
    other_names = ("EAGLE",)
    head_format = f"{_FORMATS}.eagle:EAGLE"
    network = f"{_NETWORKS}.fused:FusedHead"
    native_network = f"{_NETWORKS}.native:NativeHead"
    grows_trees = True


@dataclass(frozen=True)
class Eagle3Config(AttentionHeadConfig):
    """EAGLE-3: a decoder layer on tokens and the hidden states of three of the target's layers."""

    name = "eagle3"
    other_names = ("EAGLE3",)
    head_format = f"{_FORMATS}.eagle3:EAGLE3"
    network = f"{_NETWORKS}.eagle3:Eagle3Head"
    native_network = f"{_NETWORKS}.native:NativeHead"
    trained = TrainedDrafter(f"{_DRAFTERS}.eagle3:Eagle3Drafter", True)
    grows_trees = True


@dataclass(frozen=True)
class MtpConfig(AttentionHeadConfig):
    """Multi-token prediction: a layer that was trained with the target, in its checkpoint."""

    name = "mtp"
    other_names = (
        "NEXTN",
        *("deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "longcat_flash_mtp"),
        *("mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"),
    )
    head_format = f"{_FORMATS}.mtp:MTP"
    network = f"{_NETWORKS}.fused:FusedHead"
    native_network = f"{_NETWORKS}.native:NativeHead"
    grows_trees = True
    is_in_target = True


@dataclass(frozen=True)
class ParallelEagleConfig(AttentionHeadConfig):
    """P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass, after mask tokens."""

    name = "p_eagle"
    parallel_of = Eagle3Config.name
    head_format = f"{_FORMATS}.eagle3:P_EAGLE"
    network = f"{_NETWORKS}.p_eagle:ParallelEagleHead"
    drafts_by_depth = True


@dataclass(frozen=True)
class DFlashConfig(AttentionHeadConfig):
    """DFlash: a block of masked tokens that attends to the target's features."""

    name = "dflash"
    other_names = ("DFLASH",)
    head_format = f"{_FORMATS}.dflash:DFLASH"
    network = f"{_NETWORKS}.dflash:DFlashHead"
    native_network = f"{_NETWORKS}.native_dflash:NativeDFlashHead"
    drafts_by_depth = True
    trained = TrainedDrafter(f"{_DRAFTERS}.dspark:DFlashDrafter", True, ("num_layers",))


@dataclass(frozen=True)
class DSparkConfig(AttentionHeadConfig):
    """DSpark: as DFlash, with a prediction at the block's first token, and links between tokens."""

    name = "dspark"
    other_names = ("DSPARK",)
    head_format = f"{_FORMATS}.dflash:DSPARK"
    network = f"{_NETWORKS}.dflash:DFlashHead"
    native_network = f"{_NETWORKS}.native_dflash:NativeDFlashHead"
    drafts_by_depth = True
    trained = TrainedDrafter(
        f"{_DRAFTERS}.dspark:DSparkDrafter", True, ("num_layers", "markov_rank", "markov_head")
    )


@dataclass(frozen=True)
class ColocatedDraftModelConfig(AttentionHeadConfig):
    """A draft model in the processes of the target's ranks, which divide it as the target.

    It has the target's vocabulary, drafts in the target's step, and its KV is in the target's
    blocks.
    """

    name = "colocated_draft_model"
    head_format = f"{_FORMATS}.whole_model:WHOLE_MODEL"
    network = f"{_NETWORKS}.whole_model:read_whole_model"
    native_network = f"{_NETWORKS}.whole_model:WholeModelHead.on_native_kernels"
    grows_trees = True
    has_layers_of_model = True


HEAD_METHODS: tuple[type[HeadMethodConfig], ...] = (
    MedusaConfig,
    MlpSpeculatorConfig,
    HydraConfig,
    EagleConfig,
    Eagle3Config,
    MtpConfig,
    ParallelEagleConfig,
    DFlashConfig,
    DSparkConfig,
    ColocatedDraftModelConfig,
)
"""The part of `methods.METHODS` that drafts with heads, in the order of messages."""


def tree_defaults(methods: Iterable[MethodConfig]) -> dict[str, int]:
    """Return the numbers of speculative_config that the shape of a head's trees gives, if one has.

    The tokens of a tree, and of its longest path.
    """
    for each in methods:
        if isinstance(each, HeadMethodConfig) and (choices := each.tree_choices):
            depth = max(map(len, choices))
            return {"num_draft_tree_tokens": len(choices), "num_speculative_tokens": depth}
    return {}
