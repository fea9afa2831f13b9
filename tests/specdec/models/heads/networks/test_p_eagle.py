"""P-EAGLE: one pass over mask tokens, against a reference over the whole sequence."""

import pytest
import torch

from specdec.models.heads.config import HeadConfig
from tests.specdec.models.heads.driver import (
    HIDDEN,
    RANKS_AND_KERNELS,
    VOCAB,
    head_logits,
    save,
    selected_logits,
    sequences,
)
from tests.specdec.models.heads.networks.test_eagle3 import (
    CONFIG,
    DEFAULT,
    IDS,
    Reference,
    eagle3_weights,
    speculators,
)

MASK = 17


def p_eagle_weights(layers=2, shape=(1, 1, 3 * HIDDEN)):
    made = eagle3_weights(layers=layers, extra={"embed_tokens.weight": (VOCAB, HIDDEN)})
    generator = torch.Generator().manual_seed(9)
    return made | {"mask_hidden": torch.randn(shape, generator=generator)}


def reference(made, parts, target_dir, ids=DEFAULT):
    """Return logits [B, 5, V]: of the last pair, and of four mask tokens after it."""
    head = Reference(made, target_dir, ids)
    mask = made["mask_hidden"].reshape(1, -1) @ made["fc.weight"].T
    logits = []
    for part in parts:
        tokens = torch.tensor(part.tokens[1:] + [MASK] * 4)
        features = torch.cat([head.features(part), mask.expand(4, -1)])
        logits.append(head.to_logits(head.run(tokens, features)[-5:]))
    return torch.stack(logits)


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG | {"mask_token_id": MASK, "num_hidden_layers": 2}, (1, 1, 3 * HIDDEN)),
        (CONFIG | {"ptd_token_id": MASK, "num_hidden_layers": 2}, (3 * HIDDEN,)),
        (
            speculators(
                {"speculators_model_type": "peagle", "mask_token_id": MASK, IDS: [2, 4, 5]},
                num_hidden_layers=2,
            ),
            (1, 1, 3 * HIDDEN),
        ),
    ],
    ids=["raw", "flat", "speculators"],
)
def test_logits_equal_the_reference(tmp_path, target_dir, target, config, shape, size, kernels):
    made, parts = p_eagle_weights(shape=shape), sequences()
    is_pickled = shape != (1, 1, 3 * HIDDEN)
    save(tmp_path, config, made, "pytorch_model.bin" if is_pickled else "model.safetensors")
    assert HeadConfig.from_directory(tmp_path, target).method == "p_eagle"
    expected = reference(made, parts, target_dir)
    for borders in ((), (5, 12)):
        options = {"size": size, "kernels": kernels, "borders": borders}
        found = head_logits(tmp_path, target_dir, parts, **options)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_draft_that_goes_on_for_one_sequence(tmp_path, target_dir):
    made, parts = p_eagle_weights(), sequences()
    save(tmp_path, CONFIG | {"mask_token_id": MASK, "num_hidden_layers": 2}, made)
    found = selected_logits(tmp_path, target_dir, parts)
    expected = reference(made, parts, target_dir)[-1:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_sequence_without_room_for_the_longest_draft(tmp_path, target_dir):
    """Its blocks end two slots after its pairs, where two mask tokens fit."""
    from specdec.models.config.model_config import ModelConfig
    from specdec.models.heads.config import HeadConfig
    from specdec.models.heads.loading import load_head
    from tests.specdec.models.heads.driver import Drafting, target_model

    made, parts = p_eagle_weights(), sequences((11, 5, 23))
    save(tmp_path, CONFIG | {"mask_token_id": MASK, "num_hidden_layers": 2}, made)
    config = HeadConfig.from_directory(tmp_path, ModelConfig.from_directory(target_dir))
    drafting = Drafting(load_head(config, target_model(target_dir)), parts)
    drafting.tables[1] = drafting.tables[1][:2]
    found, expected = drafting.run(), reference(made, parts, target_dir)
    torch.testing.assert_close(found[1, :3], expected[1, :3], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found[::2], expected[::2], atol=2e-4, rtol=1e-4)
