# Modules: specdec.config.speculation.target_lookup, specdec.engine.memory.rank_lookups
"""Where n-grams are looked up, and the memory of the texts on a GPU."""

from dataclasses import replace

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculation.target_lookup import with_lookup_on_ranks
from specdec.engine.memory import rank_lookups
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.proposers import make_proposer
from specdec.speculation.proposers.target_head import TargetHeadProposer

NGRAM = SpeculativeConfig.of("ngram", 5, prompt_lookup_min=3, prompt_lookup_max=6)


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setattr(rank_lookups, "has_triton_package", lambda: True)


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


def config_of(speculation=NGRAM, **changes):
    values = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16, "max_model_len": 200}
    return LLMConfig(model="tiny", speculative_config=speculation, **{**values, **changes})


def test_the_ranks_of_a_gpu_look_up(model):
    """The engine and its ranks have the same method, with the same keys and name."""
    found = memory_plan(config_of(), Models(model), 2**34).engine
    [drafter] = found.speculation.rank_drafters
    assert drafter.place is DraftPlace.TARGET
    assert (drafter.prompt_lookup_min, drafter.prompt_lookup_max) == (3, 6)
    assert found.speculation.method == "ngram"
    assert found.speculation.holds_drafts
    assert found.speculation.head is None
    assert found.rank_drafters_read_tokens
    assert isinstance(make_proposer(found.speculation), TargetHeadProposer)
    assert SpeculativeConfig.of(**found.speculation.to_mapping()) == NGRAM


@pytest.mark.parametrize(
    "roles",
    [
        {"method": "medusa", "model": "heads", "first": "ngram"},
        {"method": "ngram", "fallback": {"method": "eagle3", "model": "head"}},
    ],
)
def test_lookups_before_a_head_are_in_its_process(roles):
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, **roles)
    found = with_lookup_on_ranks(speculation)
    assert found.rank_drafters == found.drafters
    assert found.methods == speculation.methods
    assert found.holds_drafts
    assert found.head == speculation.head
    assert not speculation.holds_drafts


def test_steps_that_wait_for_the_host_keep_the_engines_lookup(model, monkeypatch):
    served = rank_lookups.served_speculation
    assert served(config_of(device="cpu", dtype="float32"), model) is NGRAM
    assert served(config_of(), replace(model, transformers="code")) is NGRAM
    by_torch = config_of(kernels="torch")
    assert served(by_torch, model) is NGRAM
    assert rank_lookups.lookup_bytes(by_torch, model) == 0
    assert served(config_of(None), model) is None
    monkeypatch.setattr(rank_lookups, "has_triton_package", lambda: False)
    assert served(config_of(), model) is NGRAM


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("suffix", {}),
        ("ngram", {"fallback": "suffix"}),
        ("medusa", {"model": "heads"}),
        ("medusa", {"model": "heads", "fallback": "ngram"}),
        ("medusa", {"model": "heads", "first": "ngram", "fallback": "suffix"}),
        ("ngram", {"num_draft_tree_tokens": 8}),
        ("ngram", {"batch_budget": True}),
        ("ngram", {"verifier": "rejection"}),
    ],
)
def test_drafts_that_ranks_cannot_hold_are_the_engines(method, keys):
    speculation = SpeculativeConfig.of(method, 3, **keys)
    assert with_lookup_on_ranks(speculation) is speculation


def test_the_texts_are_in_the_plan(model):
    """A token has 4 bytes; there is a text of padding, and a column for tokens of no text."""
    config, expected = config_of(), 4 * 17 * 201
    assert rank_lookups.lookup_bytes(config, model) == expected
    of_suffix = config_of(SpeculativeConfig.of("suffix", 5))
    assert rank_lookups.lookup_bytes(of_suffix, model) == 0
    of_both = [gpu_workspace_bytes(each, model, drafts=False) for each in (config, of_suffix)]
    assert of_both[0] - of_both[1] == expected
    of_draft = [gpu_workspace_bytes(each, model, drafts=True) for each in (config, of_suffix)]
    assert of_draft[0] == of_draft[1]
