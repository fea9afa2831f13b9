"""Batches of several adapters: rows, prefixes of outputs, and counts by adapter."""

import json

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.messages import BASE_MODEL
from tests.specdec.adapters import ATTENTION, adapter_dir
from tests.specdec.engine.test_lora import NUM_ADAPTERS, config, requests, same_prompt
from tests.specdec.engines import (
    local_engine,
    request,
    run,
    with_adapter,
)


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    variants = [{}, {"rank": 8, "modules": ATTENTION}, {"rank": 1}, {"rank": 16, "layers": [1]}]
    return {
        f"a{index}": adapter_dir(
            root / f"a{index}", tiny_model_dir, seed=index, **variants[index % len(variants)]
        )
        for index in range(NUM_ADAPTERS)
    }


def test_outputs_of_other_adapters_are_not_drafted(tiny_model_dir, adapters):
    """A lookup in earlier outputs has those of the same adapter alone."""
    speculation = SpeculativeConfig.of(method="suffix", num_speculative_tokens=3)
    engine = local_engine(tiny_model_dir, config(speculation=speculation), adapters=adapters)
    cache_of = engine._speculator._proposer.cache
    run(engine, same_prompt(engine, ["a0"]))
    engine.step()
    tenants = set(cache_of._trees) | {each.tenant for each in cache_of._pending}
    assert tenants == {("", engine.adapters.ids["a0"])}


def test_acceptance_by_adapter_is_counted(tiny_model_dir, adapters):
    engine = local_engine(tiny_model_dir, config(3), adapters=adapters)
    found = run(engine, requests(engine))
    counts = engine.stats().counts
    assert counts.tokens_by_adapter == {f"a{i}": 24 for i in range(NUM_ADAPTERS)}
    drafts = counts.drafts_by_adapter
    by_adapters = sum(each.num_draft_tokens for each in drafts.values())
    assert 0 < by_adapters <= counts.speculation.num_draft_tokens
    assert sum(each.num_accepted_tokens for each in drafts.values()) > 0
    info = {each.name: each for each in engine.adapter_infos()}
    assert info["a2"].speculation == drafts["a2"]
    assert info["a2"].num_generated_tokens == len(found["a2"].token_ids)
    assert json.dumps(sorted(counts.tokens_by_adapter)) == json.dumps(sorted(info))


def test_rows_of_an_adapter_are_sent_next_to_each_other(tiny_model_dir, adapters):
    engine = local_engine(
        tiny_model_dir, config(), adapters={name: adapters[name] for name in ("a0", "a1")}
    )
    steps, begin = [], engine._steps.target.begin
    engine._steps.target.begin = lambda step: (steps.append(step), begin(step))
    order = ["a1", "", "a0", "a1", "", "a0"]
    run(
        engine,
        [with_adapter(engine, request(str(i), [5, 6, i]), name) for i, name in enumerate(order)],
    )
    rows = next(step.rows for step in steps if len(step.rows) == 6)
    assert [row.adapter_id for row in rows] == [BASE_MODEL, BASE_MODEL, 1, 1, 2, 2]
