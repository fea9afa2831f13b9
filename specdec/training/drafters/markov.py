"""The Markov head of DSpark in training, over all draft tokens of many bases at once.

`specdec.models.heads.networks.markov` has the equations and serves it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.heads.formats.dflash import MarkovKind
from specdec.training.data.target import Target
from specdec.training.drafters.layers import rows_product


class MarkovHead(nn.Module):
    """A low-rank bias of the logits by the token before or, of kind rnn, by all tokens before.

    At first it adds nothing. Its rows are random projections of the embeddings, so that similar
    tokens have similar rows. The gates of gated and rnn are half open; the state of rnn is a mean
    of the rows of its path, and its latent state is made of the row of the last token.
    """

    def __init__(self, kind: MarkovKind, rank: int, target: Target, num_tokens: int) -> None:
        """num_tokens: of the draft vocabulary."""
        super().__init__()
        size, self.kind, self.rank = target.config.hidden_size, kind, rank
        self.embedding = nn.Embedding(target.config.vocab_size, rank)
        self.output_head = nn.Linear(rank, num_tokens, bias=False)
        self.projection: nn.Linear | None = None
        if kind == "gated":
            self.projection = nn.Linear(size + rank, rank)
        elif kind == "rnn":
            self.projection = nn.Linear(2 * rank + size, 3 * rank)
        with torch.no_grad():
            rows = F.normalize(target.embedding) @ torch.randn(size, rank)
            self.embedding.weight.copy_(rows)
            self.output_head.weight.zero_()
            if self.projection is not None:
                self.projection.weight.zero_()
                self.projection.bias.zero_()
            if self.projection is not None and kind == "rnn":
                # Rows of gate, candidate and output; columns of state, token and slot.
                self.projection.weight[rank:, rank : 2 * rank] = torch.eye(rank).repeat(2, 1)

    def forward(self, outputs: Tensor, before: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return the bias [depth, c, V] of draft tokens of c bases.

        outputs: of their slots, [depth, c, hidden_size]. before: rows of `embedding` for the tokens
        before them, [depth, c, rank]. columns: as for `Drafter.logits`.
        """
        return rows_product(self._latent(outputs, before), self.output_head.weight, columns)

    def _latent(self, outputs: Tensor, before: Tensor) -> Tensor:
        """Return what the output matrix reads, [depth, c, rank]."""
        if self.projection is None:
            return before
        if self.kind == "gated":
            gates: Tensor = self.projection(torch.cat([outputs, before], -1)).sigmoid()
            return gates * before
        state, latents = torch.zeros_like(before[0]), list[Tensor]()
        for output, row in zip(outputs, before, strict=True):
            joint = self.projection(torch.cat([state, row, output], -1))
            gate, candidate, latent = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            latents.append(latent.tanh())
        return torch.stack(latents)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of the published layout."""
        own = {
            "markov_w1.weight": self.embedding.weight,
            "markov_w2.weight": self.output_head.weight,
        }
        if self.projection is not None:
            name = "gate_proj" if self.kind == "gated" else "joint_proj"
            own |= {f"{name}.weight": self.projection.weight, f"{name}.bias": self.projection.bias}
        return {f"markov_head.{name}": each.detach() for name, each in own.items()}
