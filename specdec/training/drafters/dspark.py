"""DSpark (arXiv 2607.05147), and its plain form DFlash (arXiv 2602.06036): a draft in one pass.

Both draft by a block of mask tokens after the base (`specdec.training.drafters.blocks`). In DFlash
each mask predicts its own token. In DSpark each slot, that of the base included, predicts the token
after it; a Markov head adds to its logits a low-rank function of the tokens before, and a
confidence head predicts the probability that the target accepts it.

The files have the layout of the `speculators` library, which allows for a reduced vocabulary. Its
key `sample_from_anchor` records whether the slot of the base predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.dflash import evenly_spaced
from specdec.models.heads.formats.taps import Taps
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter
from specdec.training.drafters.blocks import BlockLayer, Blocks
from specdec.training.drafters.layers import RMSNorm, draft_id_tensors, linear
from specdec.training.drafters.markov import MarkovHead

_MAX_TAPS = 5
_DEFAULT_NUM_LAYERS, _DEFAULT_MARKOV_RANK = 2, 64
_LIBRARY_VERSION = "0.9.0"


class BlockDrafter(Drafter):
    """Layers of the target's sizes over blocks, and an output head.

    predicts_from_base: whether the slot of the base predicts, and each slot the token after it.
    """

    predicts_from_base: ClassVar[bool]
    library_type: ClassVar[str]
    architecture: ClassVar[str]

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter."""
        super().__init__(target, token_ids, config)
        model = target.config
        size, eps = model.hidden_size, model.rms_norm_eps
        self.block_size = self.depth + (0 if self.predicts_from_base else 1)
        self.mask_token_id = _mask_token_id(model)
        self._model, self._read = model, _layers_read(model)
        self._layer_fields = target.layer_fields
        self.taps = self._read.ascending
        self.fc = linear(len(self._read.layer_ids) * size, size)
        self.context_norm = RMSNorm(size, eps)
        num_layers = config.num_layers or _DEFAULT_NUM_LAYERS
        self.layers = nn.ModuleList(BlockLayer(target) for _ in range(num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = linear(size, len(token_ids))
        # Frozen: the served head reads the target's.
        self._embedding = target.embedding.to(target.device)
        self._rotary = RotaryEmbedding(
            model.head_dim, model.max_position_embeddings, model.rope, torch.float32, target.device
        )
        self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: Target) -> None:
        """Copy the target's last layers, its final norm and its output head.

        At first the highest feature passes to the context unchanged.
        """
        size, num_layers = self._model.hidden_size, self._model.num_layers
        first = num_layers - len(self.layers)
        self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)
        for index, layer in enumerate(self.layers, first):
            assert isinstance(layer, BlockLayer)
            layer.start_from(target, max(0, index))
        last = f"model.layers.{num_layers - 1}.input_layernorm.weight"
        self.context_norm.weight.copy_(target.weight(last, (size,)))
        self.norm.weight.copy_(target.weight("model.norm.weight", (size,)))
        self.lm_head.weight.copy_(target.lm_head[self.token_ids])

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        taps = [target.tapped[:, place] for place in self._read.order]
        read = torch.cat(taps, dim=1)  # [T, num_taps * hidden_size]
        context = self.context_norm(self.fc(read))
        blocks = Blocks.of(batch, self.block_size, self.mask_token_id, self._rotary)
        x = F.embedding(blocks.token_ids, self._embedding)
        for layer in self.layers:
            x = layer(x, context, blocks)
        outputs: Tensor = self.norm(x).unflatten(0, (batch.num_bases, self.block_size))
        return outputs[:, self.block_size - self.depth :].transpose(0, 1)

    def config(self) -> Mapping[str, Any]:
        """See Drafter."""
        model = self._model
        layers = {
            "model_type": "qwen3",
            "num_hidden_layers": len(self.layers),
            **self._layer_fields,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": False,
        }
        greedy = {"proposal_type": "greedy", "speculative_tokens": self.depth}
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.library_type,
            "speculators_version": _LIBRARY_VERSION,
            "speculators_config": {
                "algorithm": self.library_type,
                "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": None, "architectures": [model.architecture]},
            },
            "transformer_layer_config": layers,
            "draft_vocab_size": len(self.token_ids),
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": list(self._read.layer_ids),
            "sample_from_anchor": self.predicts_from_base,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        modules: dict[str, nn.Linear | RMSNorm] = {
            "fc": self.fc,
            "hidden_norm": self.context_norm,
            "norm": self.norm,
            "lm_head": self.lm_head,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, BlockLayer)
            modules |= {f"layers.{index}.{name}": each for name, each in layer.published().items()}
        tensors = {f"{name}.weight": module.weight.detach() for name, module in modules.items()}
        return tensors | draft_id_tensors(self.token_ids, self._model.vocab_size)


class DFlashDrafter(BlockDrafter):
    """A block drafter whose masks predict their own tokens."""

    predicts_from_base = False
    library_type, architecture = "dflash", "DFlashSpeculator"


class DSparkDrafter(BlockDrafter):
    """A block drafter with a Markov head and a confidence head.

    Its states are the outputs of the slots, followed by the Markov head's row for the token before.
    """

    predicts_from_base = True
    library_type, architecture = "dspark", "DSparkSpeculator"

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter."""
        super().__init__(target, token_ids, config)
        rank = config.markov_rank or _DEFAULT_MARKOV_RANK
        self.markov = MarkovHead(config.markov_head or "vanilla", rank, target, len(token_ids))
        self.confidence_head = nn.Linear(target.config.hidden_size + rank, 1)
        with torch.no_grad():
            for parameter in self.confidence_head.parameters():
                parameter.zero_()

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        before = self.markov.embedding(batch.token_ids[batch.places(self.depth)])
        return torch.cat([super().states(batch, target), before], dim=-1)

    def logits(self, states: Tensor, columns: Tensor | None = None) -> Tensor:
        """See Drafter."""
        rank = self.markov.rank
        outputs, before = states.split([states.shape[-1] - rank, rank], dim=-1)
        bias: Tensor = self.markov(outputs, before, columns)
        return super().logits(outputs, columns) + bias

    def confidence(self, states: Tensor) -> Tensor:
        """See Drafter."""
        log_odds: Tensor = self.confidence_head(states)
        return log_odds.squeeze(-1)

    def config(self) -> Mapping[str, Any]:
        """See Drafter."""
        return {
            **super().config(),
            "markov_rank": self.markov.rank,
            "markov_head_type": self.markov.kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        confidence = {
            "confidence_head.proj.weight": self.confidence_head.weight.detach(),
            "confidence_head.proj.bias": self.confidence_head.bias.detach(),
        }
        return {**super().tensors(), **self.markov.tensors(), **confidence}


def _layers_read(model: ModelConfig) -> Taps:
    """Return the default layers of DFlash, fewer for a target of few layers."""
    return evenly_spaced(max(1, min(_MAX_TAPS, model.num_layers - 3)), model)


def _mask_token_id(model: ModelConfig) -> int:
    """Return the last token that ends no answer: reserved in many vocabularies, rare in others."""
    return max(set(range(model.vocab_size)) - model.eos_token_ids)
