"""Every kind of head beside a 16-bit target, whose hidden states native kernels give in float32."""

import pytest
import torch

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from tests.specdec.models.heads.driver import KERNELS, Drafting, save, sequences, target_model
from tests.specdec.models.heads.test_malformed import base_of

KINDS = ["medusa", "mlp", "hydra", "eagle", "eagle3", "speculators", "p_eagle", "dflash", "dspark"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_logits_are_near_those_of_32_bits(tmp_path, target_dir, target, kind, kernels):
    torch.set_num_threads(1)
    save(tmp_path, *base_of(kind))
    config, parts, logits = HeadConfig.from_directory(tmp_path, target), sequences(), []
    for dtype in (torch.float32, torch.bfloat16):
        model = target_model(target_dir, kernels=kernels, dtype=dtype)
        logits.append(Drafting(load_head(config, model), parts).run().float())
    exact, rounded = logits
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).min() > 0.98
