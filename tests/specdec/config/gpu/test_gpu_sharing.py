"""A target and a draft model on one GPU."""

import pytest

from specdec.config.gpu.gpu_sharing import with_gpu_sharing
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError


def config(device="cuda", size=1, **drafting):
    speculation = SpeculativeConfig.of("draft_model", **drafting)
    return LLMConfig(
        model="tiny", device=device, tensor_parallel_size=size, speculative_config=speculation
    )


@pytest.mark.parametrize(
    ("given", "num_gpus", "shares"),
    [
        (config(), 1, True),
        (config(), 2, False),
        (config(share_gpu=True), 2, True),
        (config(share_gpu=False), 1, False),
        (config(size=2), 1, False),
        (config(draft_tensor_parallel_size=2), 1, False),
        (config(device="cpu"), 1, False),
        (config(first="ngram"), 1, True),
    ],
)
def test_models_share_the_only_gpu_or_as_configured(given, num_gpus, shares):
    assert with_gpu_sharing(given, num_gpus).shares_gpu == shares


def test_without_a_draft_model_nothing_is_shared():
    given = LLMConfig(model="tiny", device="cuda")
    assert with_gpu_sharing(given, 1) is given
    assert not given.shares_gpu


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "cpu"}, "share_gpu"),
        ({"size": 2}, "share_gpu"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ],
)
def test_only_single_ranks_on_a_gpu_share_it(changes, field):
    with pytest.raises(InvalidValueError, match=f"speculative_config.{field} is"):
        config(share_gpu=True, **changes)
