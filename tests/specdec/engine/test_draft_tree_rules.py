"""Trees of drafts with rules that depend on the path: penalties, bad words, grammars, logprobs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.text.grammar.matcher import MAX_CONSTRAINED_NODES, OutputConstraint
from specdec.text.tokenizer import Tokenizer
from specdec.types.drafts.draft_tree import paths
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engine.test_draft_trees import (
    NUM_NODES,
    answers_of,
    expected_of,
    requests_of,
    tree_engine,
)
from tests.specdec.engine.test_nan_logits import POISON, engine_for, sound, text, texts
from tests.specdec.engines import engine_config, local_engine, make_engine, request, run, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.tiny import tiny_llama_dir
from tests.specdec.trees import TreeProposer

RULES = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"logit_bias": {20: 3.0, 21: 3.0}, "min_tokens": 20},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.05},
    {"frequency_penalty": 1.0, "logprobs": 3},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: next(iter(rules)))
@pytest.mark.parametrize(
    ("size", "temperature"),
    [
        (1, 0),
        (2, 0.8),
        pytest.param(1, 0.8, marks=pytest.mark.slow),
        pytest.param(2, 0, marks=pytest.mark.slow),
    ],
)
def test_rules_follow_the_path(tiny_model_dir, rules, temperature, size):
    requests = requests_of(temperature, **rules)
    answers = answers_of(tiny_model_dir, requests)
    config = engine_config(NUM_NODES, max_num_batched_tokens=256)

    def generated(group):
        engine = tree_engine(tiny_model_dir, config, answers, group)
        return tokens_by(engine, requests), engine.stats().counts.speculation

    tokens, stats = run_ranks(size, generated)[0]
    assert tokens == expected_of(answers, requests)
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_log_probabilities_are_those_along_the_path(tiny_model_dir, temperature):
    requests = requests_of(temperature, logprobs=2)
    answers = answers_of(tiny_model_dir, requests)
    plain = run(local_engine(tiny_model_dir, engine_config(0)), requests)
    config = engine_config(NUM_NODES, max_num_batched_tokens=256)
    trees = run(tree_engine(tiny_model_dir, config, answers), requests)
    for name, expected in plain.items():
        for field in ("token_ids", "ranks", "logprobs"):
            joined = [
                np.concatenate([getattr(step, field) for step in each.logprobs])
                for each in (trees[name], expected)
            ]
            np.testing.assert_allclose(*joined, atol=1e-4)


class Spread(TreeProposer):
    """Guesses the answer's next tokens, each beside wrong siblings."""

    def tree(self, answer, length, count):
        tokens, parents, parent = [], [], -1
        for token in answer[length : length + count // 3]:
            for each in (token + 1, token, token + 2):
                tokens.append(each % self.vocab_size)
                parents.append(parent)
            parent = len(tokens) - 2
        return tuple(tokens), tuple(parents)


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}'


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "grammar",
    [StructuredOutput(regex="[a-z ]{40,60}"), StructuredOutput(json_schema=SCHEMA)],
    ids=["regex", "json"],
)
def test_grammars_mask_each_path(tiny_model_dir, grammar, temperature):
    params = {"structured_output": grammar, "ignore_eos": False, "max_tokens": 40}
    compiled = grammar_compiler(tiny_model_dir).compile(grammar)
    requests = [replace(each, grammar=compiled) for each in requests_of(temperature, 4, **params)]
    plain = run(local_engine(tiny_model_dir, engine_config(0)), requests)
    answers = {
        each.prompt_token_ids: (*each.prompt_token_ids, *plain[each.request_id].token_ids)
        for each in requests
    }
    config = engine_config(30, max_num_batched_tokens=256)
    target, rows = recording_target(tiny_model_dir, config)
    engine = make_engine(tiny_model_dir, config, target, Spread(answers, 30))
    assert tokens_by(engine, requests) == {name: each.token_ids for name, each in plain.items()}
    trees = [row for row in rows if row.drafting.parents]
    assert max(row.num_draft_tokens for row in rows) > 0
    assert all(row.num_draft_tokens <= MAX_CONSTRAINED_NODES for row in trees)
    if grammar.regex:
        assert trees


def recording_target(directory, config):
    """Return a target and the rows that it runs."""
    target, rows = (
        LocalTarget(load_target(RankModel(directory, "float32", config), TensorParallelGroup())),
        [],
    )
    begin = target.begin

    def recorded(step):
        rows.extend(step.rows)
        begin(step)

    target.begin = recorded
    return target, rows


def test_masks_of_a_tree_are_those_of_its_paths(tiny_model_dir):
    tokenizer = Tokenizer(tiny_model_dir)
    grammar = grammar_compiler(tiny_model_dir).compile(StructuredOutput(regex="(ab|ac|b[cd])+"))
    ids = {letter: tokenizer.encode(letter)[-1] for letter in "abcdz"}

    def constraint():
        return OutputConstraint(grammar, 0, 0, ())

    letters, parents = "abczbdb", (-1, 0, 0, 0, -1, 4, 2)
    tokens = [ids[letter] for letter in letters]
    pruned = constraint().prune(tokens, parents, len(tokens))
    kept = [0, 1, 2, 4, 5, 6]  # without z
    assert pruned.token_ids == tuple(tokens[node] for node in kept)
    assert pruned.parents == (-1, 0, 0, -1, 3, 2)
    for path in paths(pruned.parents):
        along = constraint().along([pruned.token_ids[node] for node in path])
        assert (pruned.masks[path[-1] + 1] == along.masks[-1]).all()
    assert (pruned.masks[0] == along.masks[0]).all()


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tokens_on_the_path_before_the_nan_are_returned(untied_dir, kernels):
    """A bias generates POISON after a few tokens; the logits after it are NaN."""
    params = {"temperature": 1.0, "logit_bias": {POISON: 7.0}, "max_tokens": 60}
    requests = [request(f"r{i}", text(i), seed=i, **params) for i in range(4)]
    plain = run(engine_for(untied_dir, None, drafts=0), requests)
    answers = {
        each.prompt_token_ids: (*each.prompt_token_ids, *plain[each.request_id].token_ids)
        for each in requests
    }
    engine = engine_for(
        untied_dir,
        torch.nan,
        proposer=Spread(answers, 12),
        drafts=12,
        kernels=kernels,
        max_num_batched_tokens=256,
    )
    for name, found in run(engine, requests).items():
        expected = plain[name].token_ids
        length = expected.index(POISON) + 1
        assert found.token_ids == expected[:length]
        assert found.error.num_output_tokens == length
    assert engine.stats().counts.speculation.num_accepted_tokens > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_poisoned_node_beside_the_path_changes_no_token(untied_dir, kernels):
    requests = sound()
    plain = texts(run(engine_for(untied_dir, None), requests))
    answers = {
        each.prompt_token_ids: (*each.prompt_token_ids, *plain[each.request_id])
        for each in requests
    }

    class Poisoned(Spread):
        def tree(self, answer, length, count):
            tokens, parents = super().tree(answer, length, count)
            return (POISON, *tokens)[:count], (
                -1,
                *(each + 1 if each >= 0 else -1 for each in parents),
            )[:count]

    engine = engine_for(
        untied_dir, torch.nan, proposer=Poisoned(answers, 9), drafts=9, kernels=kernels
    )
    assert texts(run(engine, requests)) == plain
