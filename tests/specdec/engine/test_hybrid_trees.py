"""Models with recurrent layers and trees of drafts: no token depends on them."""

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from tests.specdec.engine.test_hybrids import (
    COMPILED,
    SMALL_POOL,
    TEMPERATURES,
    hybrid_config,
    requests,
)
from tests.specdec.engines import local_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.lora.test_hybrid_adapters import kernels_of
from tests.specdec.tiny import train_tokenizer
from tests.specdec.trees import TreeProposer

FAMILIES = [
    name if name == "qwen3-next" else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS
]
NUM_NODES = 9
SPECULATION = SpeculativeConfig.of(
    num_speculative_tokens=4, num_draft_tree_tokens=NUM_NODES, prompt_lookup_min=1
)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    train_tokenizer(383).save_pretrained(directory)
    return directory


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("native", marks=COMPILED),
    ],
)
def expected(request, directory):
    """Return the kernels, and the tokens of requests without drafts, by temperature."""
    kernels = kernels_of(directory, request.param)
    config = hybrid_config(0, enable_prefix_caching=False)
    engine = local_engine(directory, config, kernels=kernels)
    return kernels, {each: tokens_by(engine, requests(each)) for each in (0.0, 0.8)}


def generate(directory, expected, temperature, group=None, **changes):
    """Return the tokens with trees around them, some of whose paths are right, and the counts."""
    kernels, known = expected
    asked = requests(temperature)
    answers = {
        each.prompt_token_ids: (*each.prompt_token_ids, *known[temperature][each.request_id])
        for each in asked
    }
    config = hybrid_config(0, speculation=SPECULATION, **changes)
    proposer = TreeProposer(answers, NUM_NODES)
    engine = local_engine(directory, config, group, proposer, kernels=kernels)
    return tokens_by(engine, asked), engine.stats().counts


@TEMPERATURES
@pytest.mark.parametrize(
    "changes",
    [{}, SMALL_POOL, {"async_scheduling": True, "max_num_seqs": 3}],
    ids=["batch", "preempted", "async"],
)
def test_trees_change_no_token(directory, expected, temperature, changes):
    found, counts = generate(directory, expected, temperature, **changes)
    assert found == expected[1][temperature]
    speculation = counts.speculation
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    assert counts.num_preemptions > 0 or changes != SMALL_POOL


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_do_the_same(directory, expected, size):
    found = run_ranks(size, lambda group: generate(directory, expected, 0.8, group)[0])
    assert found == [expected[1][0.8]] * size


@TEMPERATURES
def test_trees_of_lookups_change_no_token(directory, expected, temperature):
    kernels, known = expected
    config = hybrid_config(0, speculation=SPECULATION)
    engine = local_engine(directory, config, kernels=kernels)
    assert tokens_by(engine, requests(temperature)) == known[temperature]
    assert engine.stats().counts.speculation.num_draft_tokens > 0
