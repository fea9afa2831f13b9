"""Every draft head, and PARD, in every configuration: the tokens of no speculation.

One engine serves each configuration. It drafts chains or trees of depth 1, 3 and 5 at temperatures
0, 0.8 and 1, and speculation is off for some steps of every run. Prompts are chunked; later runs
find their prefixes in the cache, and in a batch of 8 sequences are preempted.
"""

import json
from functools import cache
from itertools import product

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.cpu import native_library
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.worker import HeadFiles
from tests.specdec.attention_heads import FITTED_METHODS, fitted_head_dir
from tests.specdec.engines import draft_model, engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.tiny import disturbed_llama_dir

KERNELS = ["torch"] + ["native"] * (native_library() is not None)
TEMPERATURES = (0.0, 0.8, 1.0)
LENGTHS = (1, 3, 5)
MASK = 381
NUM_NODES = 24


def requests(batch_size, temperature):
    """Return requests whose prompts have 12 to 96 tokens: two chunks of the longest."""
    sizes = range(8) if batch_size == 8 else (7, 2)
    prompts = {i: [(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * i) for i in sizes}
    return [
        request(f"r{i}", prompt, seed=i, temperature=temperature) for i, prompt in prompts.items()
    ]


@cache
def reference(directory, temperature):
    """Return the tokens of all requests without speculation."""
    return tokens_by(local_engine(directory, engine_config(0)), requests(8, temperature))


def fitted_dir(method, target_dir, directory):
    """Write a head that is fitted to the outputs after the prompts, for all draft tokens."""
    asked = [each for temperature in TEMPERATURES for each in requests(8, temperature)]
    outputs = [reference(target_dir, each.params.temperature)[each.request_id] for each in asked]
    texts = [[*each.prompt, *tokens] for each, tokens in zip(asked, outputs, strict=True)]
    if method not in FITTED_METHODS:
        return HEADS[method](target_dir, directory, texts)
    num_prompt_tokens = [len(each.prompt) for each in asked]
    return fitted_head_dir(
        method, target_dir, directory, texts, num_prompt_tokens, depth=max(LENGTHS)
    )


def pard_dir(target_dir, directory):
    """Write the target with noise and a mask token, which it was never trained on."""
    directory = disturbed_llama_dir(target_dir, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": MASK}))
    return directory


@pytest.fixture(scope="module")
def dir_of(tiny_model_dir, tmp_path_factory):
    """Return a function that gives the directory of a method's head or draft model."""

    @cache
    def write(method):
        directory = tmp_path_factory.mktemp(method)
        if method == "pard":
            return pard_dir(tiny_model_dir, directory)
        return fitted_dir(method, tiny_model_dir, directory)

    return write


def engine_with(directory, draft_dir, method, num_nodes, kernels, group, batch_size):
    """Return an engine in which only one or two of 8 sequences fit at the same time."""
    limits = {"num_blocks": 60, "max_num_seqs": batch_size, "max_num_batched_tokens": 32}
    control = SpeculationControl("on", 32, max(LENGTHS))
    policy = SpeculationPolicy(control, clock=lambda: 0.0, num_tree_tokens=num_nodes)
    if method == "pard":
        changes = {"parallel_drafting": True, "max_model_len": 120, "kernels": kernels}
        proposer = draft_model(draft_dir, group, **changes)
        config = engine_config(max(LENGTHS), **limits)
        return local_engine(directory, config, group, proposer, policy, kernels=kernels)
    speculation = SpeculativeConfig.of(
        method, max(LENGTHS), model=str(draft_dir), num_draft_tree_tokens=num_nodes
    )
    config = engine_config(speculation=speculation, **limits)
    head = HeadFiles(draft_dir, method=method)
    return local_engine(directory, config, group, None, policy, head=head, kernels=kernels)


def toggled_run(engine, asked, k, first):
    """Return the tokens of requests, and the number of trees drafted for them.

    Speculation is off in three of ten steps.

    first: of these ten steps.
    """
    tokens = {each.request_id: [] for each in asked}
    for each in asked:
        engine.add(each)
    modes, num_trees = [], 0
    while engine.has_work and len(modes) < 2000:
        modes.append("on" if (first + len(modes)) % 10 < 7 else "off")
        engine.set_speculation(SpeculationControl(modes[-1], 32, k))
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
        drafts = [seq.head_draft for seq in engine._scheduler._running]
        num_trees += sum(draft is not None and draft.parents is not None for draft in drafts)
    assert modes.count("off") > 2
    return tokens, num_trees


def check(directory, draft_dir, method, num_nodes, kernels, group, batch_size):
    engine = engine_with(directory, draft_dir, method, num_nodes, kernels, group, batch_size)
    num_trees = 0
    for index, (k, temperature) in enumerate(product(LENGTHS, TEMPERATURES)):
        before = engine.stats().counts
        asked = requests(batch_size, temperature)
        own = asked[:: -1 if index % 2 else 1]
        tokens, num_new_trees = toggled_run(engine, own, k, 3 * index)
        num_trees += num_new_trees
        expected = reference(directory, temperature)
        assert tokens == {name: expected[name] for name in tokens}, (k, temperature)
        after = engine.stats().counts
        assert (after.num_preemptions > before.num_preemptions) == (batch_size == 8)
        accepted = (each.speculation.num_accepted_tokens for each in (before, after))
        assert next(accepted) < next(accepted), (k, temperature)
    counts = engine.stats().counts
    assert (num_trees > 0) == (num_nodes > 0)
    assert counts.num_prefill_chunks > 1
    assert counts.num_cached_tokens > 50
    assert counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens
    assert len(counts.accepted_by_position) == max(LENGTHS)
    assert counts.accepted_by_position[1] > 0 or method == "pard"  # not trained on its mask


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("method", "num_nodes"), [*product(HEADS, (0, NUM_NODES)), ("pard", 0)])
def test_no_configuration_changes_a_token(
    tiny_model_dir, dir_of, method, num_nodes, kernels, size, batch_size
):
    draft_dir = dir_of(method)
    for temperature in TEMPERATURES:
        reference(tiny_model_dir, temperature)  # before the ranks start
    run_ranks(
        size,
        lambda group: check(
            tiny_model_dir, draft_dir, method, num_nodes, kernels, group, batch_size
        ),
    )
