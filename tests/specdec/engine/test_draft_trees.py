"""The real engine with trees of drafts: they change no token, and accept what a chain does."""

import pytest

from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_tree import first_path
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engine.test_lossless import prompts
from tests.specdec.engines import (
    HashTarget,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.trees import TreeProposer

NUM_NODES = 16
KERNELS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
    ),
]


def requests_of(temperature, count=8, **params):
    return [
        request(name, prompt, seed=70 + index, temperature=temperature, **params)
        for index, (name, prompt) in enumerate(prompts(count).items())
    ]


def answers_of(directory, requests):
    """Return the whole texts without speculation, by prompt."""
    generated = tokens_by(local_engine(directory, engine_config(0)), requests)
    return {
        each.prompt_token_ids: (*each.prompt_token_ids, *generated[each.request_id])
        for each in requests
    }


def expected_of(answers, requests):
    return {
        each.request_id: list(answers[each.prompt_token_ids][len(each.prompt_token_ids) :])
        for each in requests
    }


def tree_engine(directory, config, answers, group=None, policy=None, kernels="auto"):
    proposer = TreeProposer(answers, NUM_NODES)
    return local_engine(directory, config, group, proposer, policy, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("size", [1, 2])
def test_trees_change_no_token(tiny_model_dir, size, temperature, kernels):
    requests = requests_of(temperature)
    answers = answers_of(tiny_model_dir, requests)
    config = engine_config(NUM_NODES, num_blocks=70, max_num_batched_tokens=256)

    def generated(group):
        engine = tree_engine(tiny_model_dir, config, answers, group, kernels=kernels)
        return tokens_by(engine, requests), engine.stats().counts

    tokens, counts = run_ranks(size, generated)[0]
    assert tokens == expected_of(answers, requests)
    assert counts.num_preemptions > 0
    assert 0 < counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens


@pytest.mark.parametrize("kernels", KERNELS)
def test_trees_with_prefix_hits_chunks_and_toggles(tiny_model_dir, kernels):
    """Blocks that hold the KV of accepted nodes are published and reused."""
    first = requests_of(0.8)
    answers = answers_of(tiny_model_dir, first)
    again = [
        request(f"again-{each.request_id}", answers[each.prompt_token_ids], seed=9, max_tokens=8)
        for each in first
    ]
    answers |= answers_of(tiny_model_dir, again)
    on, off = (SpeculationControl(mode, 32, NUM_NODES) for mode in ("on", "off"))
    policy = SpeculationPolicy(on, clock=lambda: 0.0)
    config = engine_config(NUM_NODES, max_num_batched_tokens=48)
    engine = tree_engine(tiny_model_dir, config, answers, policy=policy, kernels=kernels)
    tokens = {}
    for batch in (first, again):
        step, generated = 0, {each.request_id: [] for each in batch}
        for each in batch:
            engine.add(each)
        while engine.has_work:
            if step % 3 == 1:
                engine.set_speculation(off if step % 2 else on)
            for output in engine.step():
                generated[output.request_id] += output.token_ids
            engine.check_integrity()
            step += 1
        tokens |= generated
    assert tokens == expected_of(answers, [*first, *again])
    counts = engine.stats().counts
    # More of each prompt is cached than the first prompts alone, so some of the generated text is.
    assert counts.num_cached_tokens > sum(len(each.prompt_token_ids) for each in first)
    assert counts.num_prefill_chunks > 0
    assert counts.speculation.num_accepted_tokens > 0
    assert engine.stats().num_speculation_flips > 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_sequence_with_large_trees(tiny_model_dir, kernels):
    [each] = requests_of(0.8, 1, max_tokens=60)
    answers = answers_of(tiny_model_dir, [each])
    config = engine_config(32, max_num_batched_tokens=160)
    proposer = TreeProposer(answers, 32, accuracy=0.9)
    engine = local_engine(tiny_model_dir, config, proposer=proposer, kernels=kernels)
    assert tokens_by(engine, [each]) == expected_of(answers, [each])
    assert engine.stats().counts.num_steps < 40


class BestChain(TreeProposer):
    """Proposes the first path of each tree only."""

    def propose(self, request):
        tree = super().propose(request)
        path = first_path(tree.parents or ())
        tokens = tuple(tree.draft_token_ids[node] for node in path)
        return type(tree)(tree.seq_id, tree.base_length, tree.base_token, tokens)


def test_a_tree_accepts_at_least_what_its_best_chain_does(tiny_model_dir):
    """The same trees, cut to their first paths, at every place of one text."""
    target = HashTarget(4, 383)
    prompt = (10, 11, 12)
    answer = (*prompt, *target.continuation(prompt, 60))
    proposer = TreeProposer({prompt: answer}, NUM_NODES)
    num_accepted = {"tree": 0, "chain": 0}
    for length in range(3, 40):
        tokens, parents = proposer.tree(answer, length, NUM_NODES)
        rest = answer[length:]
        path = [tokens[node] for node in first_path(parents)]
        chain = next((i for i, token in enumerate(path) if token != rest[i]), len(path))
        assert accepted(tokens, parents, rest) >= chain
        num_accepted["tree"] += accepted(tokens, parents, rest)
        num_accepted["chain"] += chain
    assert num_accepted["tree"] > num_accepted["chain"]


def accepted(tokens, parents, rest):
    best, depth = -1, 0
    while True:
        matches = [
            node
            for node, parent in enumerate(parents)
            if parent == best and tokens[node] == rest[depth]
        ]
        if not matches:
            return depth
        best, depth = matches[0], depth + 1


def test_fewer_steps_with_trees_than_with_their_best_chains(tiny_model_dir):
    requests = requests_of(0.8)
    answers = answers_of(tiny_model_dir, requests)
    config = engine_config(NUM_NODES, max_num_batched_tokens=256)
    num_steps = []
    for proposer in (TreeProposer, BestChain):
        engine = local_engine(tiny_model_dir, config, proposer=proposer(answers, NUM_NODES))
        assert tokens_by(engine, requests) == expected_of(answers, requests)
        num_steps.append(engine.stats().counts.num_steps)
    assert num_steps[0] < num_steps[1]


def test_slots_of_a_target_that_checks_them(tiny_model_dir):
    """The fake target reads each sequence's tokens from its slots, so compaction must be right."""
    target = HashTarget(4, 383)
    requests = [request(f"r{i}", [10 + i, 11, 12], max_tokens=40) for i in range(4)]
    answers = {
        each.prompt_token_ids: (
            *each.prompt_token_ids,
            *target.continuation(each.prompt_token_ids, 40),
        )
        for each in requests
    }
    config = engine_config(NUM_NODES, num_blocks=60, max_num_batched_tokens=128)
    proposer = TreeProposer(answers, NUM_NODES)
    engine = make_engine(tiny_model_dir, config, target, proposer)
    assert tokens_by(engine, requests) == expected_of(answers, requests)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0
    assert any(row.drafting.parents for step in target.steps for row in step.rows)


@pytest.mark.parametrize("verifier", ["rejection", "block", "typical", "threshold"])
def test_other_verifiers_get_the_best_chain(tiny_model_dir, verifier):
    requests = requests_of(0.8, speculation=SpeculationOptions(verifier=verifier))
    answers = answers_of(tiny_model_dir, requests_of(0.8))
    config = engine_config(NUM_NODES, max_num_batched_tokens=256)
    target = LocalTarget(
        load_target(RankModel(tiny_model_dir, "float32", config), TensorParallelGroup())
    )
    rows = []
    begin = target.begin
    target.begin = lambda step: (rows.extend(step.rows), begin(step))
    engine = make_engine(tiny_model_dir, config, target, TreeProposer(answers, NUM_NODES))
    tokens = tokens_by(engine, requests)
    assert all(len(each) == 24 for each in tokens.values())
    assert any(row.num_draft_tokens for row in rows)
    assert not any(row.drafting.parents for row in rows)
