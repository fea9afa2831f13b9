"""A tiny draft head with random weights: as structs of the kernels, and as a dense reference."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specdec.kernels.cpu import MatrixFormat, PackedMatrix, native_library
from specdec.kernels.cpu.decoder import (
    DecoderStruct,
    EmbeddingStruct,
    LayerStruct,
    NormStruct,
)
from specdec.kernels.cpu.draft_head import DraftHeadKernel, DraftHeadStruct
from specdec.models.config.traits import LLAMA
from specdec.models.native_weights import traits_struct

HIDDEN, UNITS, HEADS, KV_HEADS, DIM = 48, 80, 4, 2, 16
TARGET_VOCAB, DRAFT_VOCAB, MAX_POSITIONS, EPS = 700, 300, 1024, 1e-5


@dataclass(frozen=True)
class Variant:
    """Parts of a head, as in draft_head.h."""

    has_fusion: bool = False
    has_input_norms: bool = True
    has_final_norm: bool = True
    is_feature_first: bool = False
    adds_to_normed: bool = False
    returns_normed: bool = False
    num_layers: int = 1
    window: int = 0

    @property
    def has_first_norm(self):
        """Return whether the first layer has its input norm; EAGLE-3 has it outside."""
        return self.has_fusion and self.has_input_norms


EAGLE1 = Variant(has_fusion=True, has_input_norms=False, has_final_norm=False)
EAGLE3 = Variant()
VARIANTS = {
    "eagle": EAGLE1,
    "eagle3": EAGLE3,
    "eagle3-norm-before-residual": Variant(adds_to_normed=True, num_layers=2),
    "eagle3-norm-output": Variant(returns_normed=True, window=20),
    "mtp": Variant(has_fusion=True, returns_normed=True),
    "mtp-feature-first": Variant(has_fusion=True, is_feature_first=True),
}


class TinyHead:
    """Weights, the kernel that uses them, and a dense reference for one sequence."""

    def __init__(self, variant):
        generator = torch.Generator().manual_seed(3)
        self.variant = variant

        def random(*shape):
            return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

        def norm():
            return 1 + random(HIDDEN)

        self.embedding = 4 * random(TARGET_VOCAB, HIDDEN)
        self.fusion = random(HIDDEN, 2 * HIDDEN) if variant.has_fusion else None
        self.fusion_bias = random(HIDDEN)
        self.embedding_norm = norm() if variant.has_input_norms else None
        self.feature_norm = norm() if variant.has_input_norms else None
        self.final_norm = norm() if variant.has_final_norm else None
        self.lm_head = 8 * random(DRAFT_VOCAB, HIDDEN)
        order = torch.randperm(TARGET_VOCAB, generator=generator)[:DRAFT_VOCAB]
        self.target_tokens = order.sort().values.int()
        first_width = HIDDEN if variant.has_fusion else 2 * HIDDEN
        self.layers = [
            {
                "qkv": random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN if index else first_width),
                "output": random(HIDDEN, HEADS * DIM),
                "gate_up": random(2 * UNITS, HIDDEN),
                "down": random(HIDDEN, UNITS),
                "input_norm": norm() if index or variant.has_first_norm else None,
                "mlp_norm": norm(),
            }
            for index in range(variant.num_layers)
        ]
        angles = torch.outer(torch.arange(MAX_POSITIONS).float(), 0.1 ** torch.arange(DIM // 2))
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self._packed = []

    def decoder(self, *, sees_ahead=False):
        """Return the struct of the layers in float32."""
        layers = [self._layer(layer, sees_ahead) for layer in self.layers]
        return DecoderStruct(
            hidden_size=HIDDEN,
            num_hidden_units=UNITS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            heads_per_kv=HEADS // KV_HEADS,
            first_in_group=0,
            head_dim=DIM,
            rotary_dim=DIM,
            num_layers=len(self.layers),
            num_model_heads=HEADS,
            num_model_kv_heads=KV_HEADS,
            first_position=1,
            norm_eps=EPS,
            rank=0,
            traits=traits_struct(LLAMA, DIM, torch.float32),
            embedding=EmbeddingStruct(
                table=self.embedding.data_ptr(), first_token=0, num_tokens=TARGET_VOCAB
            ),
            layers=(LayerStruct * len(layers))(*layers),
            final_norm=NormStruct(_address(self.final_norm)),
        )

    def kernel(self):
        """Return the kernel of the weights in float32."""
        head = DraftHeadStruct(
            decoder=self.decoder(),
            reads_features=True,
            embedding_norm=_address(self.embedding_norm),
            feature_norm=_address(self.feature_norm),
            is_feature_first=self.variant.is_feature_first,
            adds_to_normed=self.variant.adds_to_normed,
            returns_normed=self.variant.returns_normed,
            lm_head=self._pack(self.lm_head),
            target_tokens=self.target_tokens.data_ptr(),
        )
        if self.fusion is not None:
            head.fusion = self._pack(self.fusion)
            head.fusion.bias = self.fusion_bias.data_ptr()
        return DraftHeadKernel(native_library(), head, MAX_POSITIONS)

    def states(self, token_ids, features):
        """Return (hidden, next features) of pairs 1, 2, ..., [T, HIDDEN] each, without a cache."""
        x, qkv_input = self._input(self.embedding[token_ids], features)
        positions = torch.arange(1, len(x) + 1)
        for index, layer in enumerate(self.layers):
            source = qkv_input if index == 0 else _norm(x, layer["input_norm"])
            x = x + self._attend(source @ layer["qkv"].t(), positions) @ layer["output"].t()
            gate, up = (_norm(x, layer["mlp_norm"]) @ layer["gate_up"].t()).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer["down"].t()
        hidden = _norm(x, self.final_norm)
        return hidden, hidden if self.variant.returns_normed else x

    def _input(self, embedded, features):
        """Return the residual stream and what the first layer projects."""
        normed = _norm(features, self.feature_norm)
        parts = [_norm(embedded, self.embedding_norm), normed]
        joined = torch.cat(parts[::-1] if self.variant.is_feature_first else parts, dim=1)
        if self.fusion is None:
            return (normed if self.variant.adds_to_normed else features), joined
        x = joined @ self.fusion.t() + self.fusion_bias
        return x, _norm(x, self.layers[0]["input_norm"])

    def _attend(self, qkv, positions, sees_ahead=False):
        """Return [T, HEADS * DIM]. sees_ahead: whether attention is not causal."""
        heads = qkv.view(len(qkv), -1, DIM).transpose(0, 1)  # [heads, T, DIM]
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS))
        query, key = (self._rotated(each, positions) for each in (query, key))
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (key, value))
        distance = positions[:, None] - positions
        window = self.variant.window or MAX_POSITIONS
        is_visible = ((distance >= 0) | sees_ahead) & (distance < window)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=is_visible)
        return output.transpose(0, 1).flatten(1)

    def _rotated(self, x, positions):
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _layer(self, layer, sees_ahead):
        names = ("qkv", "output", "gate_up", "down")
        norms = {name: NormStruct(_address(layer[name])) for name in ("input_norm", "mlp_norm")}
        matrices = {name: self._pack(layer[name]) for name in names}
        return LayerStruct(
            **matrices,
            **norms,
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            window=self.variant.window,
            sees_ahead=sees_ahead,
        )

    def _pack(self, weight):
        packed = PackedMatrix(native_library(), MatrixFormat.FLOAT32, tuple(weight.shape))
        packed.pack(0, weight)
        self._packed.append(packed)
        return packed.struct


def _norm(x, weight):
    return x if weight is None else F.rms_norm(x, weight.shape, weight, EPS)


def _address(values):
    return None if values is None else values.data_ptr()
