"""Models with recurrent layers and adapters: states belong to their adapter, and drafts to none."""

from functools import cache
from itertools import pairwise

import pytest

from specdec.config.engine import AdapterLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sequences import sequence
from specdec.sequences.block_manager import root_key
from tests.specdec.adapters import adapter_dir
from tests.specdec.engine.test_hybrids import (
    COMPILED,
    SMALL_POOL,
    continuations,
    guesses,
    hybrid_config,
    requests,
)
from tests.specdec.engines import (
    draft_model,
    load_adapter,
    local_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import QUICK
from tests.specdec.models.lora.test_hybrid_adapters import kernels_of, modules_of
from tests.specdec.tiny import train_tokenizer

FAMILIES = [
    name if name == "qwen3-next" else pytest.param(name, marks=pytest.mark.slow) for name in QUICK
]
LIMITS = AdapterLimits(max_loras=3, max_rank=8, max_loaded=4)
NAMES = ("", "a", "b")
TEMPERATURES = pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8]
)


@pytest.fixture(scope="module", params=FAMILIES)
def parts(request, tmp_path_factory):
    """Return a model, and adapters by name."""
    root = tmp_path_factory.mktemp(request.param)
    directory = root / "model"
    save_family(directory, request.param)
    train_tokenizer(383).save_pretrained(directory)
    how = {"modules": modules_of(directory), "gain": 0.3}
    return directory, {
        name: adapter_dir(root / name, directory, rank=4 + 4 * seed, seed=seed, **how)
        for seed, name in enumerate(NAMES[1:])
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("native", marks=COMPILED),
    ],
)
def reference(request, parts):
    """Return the kernels, and a function to the tokens of each request alone without drafts."""
    directory, _ = parts
    kernels = kernels_of(directory, request.param)

    @cache
    def tokens(temperature):
        engine = new_engine(parts, 0, kernels=kernels, enable_prefix_caching=False)
        alone = (tokens_by(engine, [each]) for each in adapted(engine, requests(temperature)))
        return {name: found for each in alone for name, found in each.items()}

    return kernels, tokens


def new_engine(parts, num_draft_tokens, group=None, proposer=None, kernels="auto", **changes):
    directory, adapters = parts
    config = hybrid_config(num_draft_tokens, adapters=LIMITS, **changes)
    return local_engine(directory, config, group, proposer, kernels=kernels, adapters=adapters)


def adapted(engine, each_of):
    """Return requests, each with one of the adapters or none."""
    return [
        with_adapter(engine, each, NAMES[index % len(NAMES)]) for index, each in enumerate(each_of)
    ]


def texts_of(known, temperature):
    return [[*each.prompt, *known[each.request_id]] for each in requests(temperature)]


@TEMPERATURES
@pytest.mark.parametrize(
    "changes",
    [{}, SMALL_POOL, {"async_scheduling": True, "max_num_seqs": 3}],
    ids=["batch", "preempted", "async"],
)
def test_drafts_change_no_token(parts, reference, temperature, changes):
    kernels, tokens = reference
    known = tokens(temperature)
    proposer = guesses(texts_of(known, temperature))
    engine = new_engine(parts, 5, None, proposer, kernels, **changes)
    assert tokens_by(engine, adapted(engine, requests(temperature))) == known
    counts = engine.stats().counts
    assert 0 < counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens
    assert counts.num_preemptions > 0 or changes != SMALL_POOL


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_generate_the_same(parts, reference, size):
    kernels, tokens = reference
    known = tokens(0.8)

    def generate(group):
        engine = new_engine(parts, 5, group, guesses(texts_of(known, 0.8)), kernels)
        return tokens_by(engine, adapted(engine, requests(0.8)))

    assert run_ranks(size, generate) == [known] * size


def test_states_of_a_prefix_are_those_of_the_adapter(parts, reference, monkeypatch):
    """Texts are continued with each adapter; at the end with keys that adapters share."""
    kernels, tokens = reference
    names = (*NAMES, "a")
    asked = continuations(requests(0.8)[3:], texts_of(tokens(0.8), 0.8)[3:])[:2]

    def generate(*, is_cached):
        changes = {"num_snapshots": 40, "enable_prefix_caching": is_cached}
        engine, found, resumed = new_engine(parts, 0, kernels=kernels, **changes), [], [0]
        for name in names:
            found += [tokens_by(engine, [with_adapter(engine, each, name)]) for each in asked]
            resumed.append(engine.stats().counts.num_resumed_tokens)
        return found, [end - start for start, end in pairwise(resumed)]

    expected, _ = generate(is_cached=False)
    found, resumed = generate(is_cached=True)
    assert found == expected
    assert resumed[3] > resumed[1] == resumed[0]
    monkeypatch.setattr(sequence, "root_key", lambda salt, _: root_key(salt))
    assert generate(is_cached=True)[0] != expected


def test_counterparts_for_the_draft_model(parts, reference):
    """The model is its own draft model, and drafts with the adapter what the target generates."""
    kernels, tokens = reference
    directory, adapters = parts
    limits = {"enable_prefix_caching": False, "max_num_seqs": 8, "max_draft_tokens": 3}
    drafter = draft_model(directory, kernels=kernels, adapters=LIMITS, **limits)
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting="off")
    engine = new_engine((directory, {}), 3, None, drafter, kernels, speculation=speculation)
    for name, path in adapters.items():
        load_adapter(engine, name, path, draft=path if name == "a" else None)
    assert tokens_by(engine, adapted(engine, requests())) == tokens(0.0)
    rates = {
        name: each.acceptance_rate for name, each in engine.stats().counts.drafts_by_adapter.items()
    }
    assert rates["a"] > max(0.9, rates["b"])
    engine.adapters.unload("a")
    assert tokens_by(engine, [request("plain", [5, 6, 7])])
