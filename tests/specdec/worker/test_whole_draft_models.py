# Modules: specdec.worker.ahead_drafter
"""Drafts that the native kernels make in one call, against those of a pass for each token."""

import json

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.models.drafters.token_map import TOKEN_MAP_FILE
from specdec.types.sampling.sampling_spec import Verifier
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.processes import results, run_processes
from tests.specdec.tiny import disturbed_llama_dir, train_tokenizer
from tests.specdec.worker.draft_steps import COUNTS, drafts, load_runner, rank_drafts

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

PLAIN = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]
NO_CUT = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2}]
OTHERS = [
    {"temperature": 0.8, "presence_penalty": 1.5},
    {"temperature": 0.8, "logit_bias": ((7, 2.0),)},
    {"temperature": 0.8, "verifier": Verifier("rejection")},
    {"temperature": 0.8, "draft_confidence_threshold": 0.01},
]


def compare(directory, rules=PLAIN, **options):
    found, calls = drafts(load_runner(directory, **options), rules)
    expected, _ = drafts(load_runner(directory, **options), rules, whole=False)
    assert found == expected
    assert [len(draft) for draft in found[0]] == [*COUNTS[: len(rules)]]
    return found, calls


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_whole_drafts_are_those_of_single_passes(tiny_model_dir, quantization):
    _, calls = compare(tiny_model_dir, quantization=quantization)
    assert calls == [[0, 1, 2], [0, 1, 2]]


def test_a_draft_has_tokens_of_the_list_only(tiny_model_dir, tmp_path):
    directory = disturbed_llama_dir(tiny_model_dir, tmp_path)
    allowed = range(3, 383, 3)
    (directory / TOKEN_MAP_FILE).write_text(json.dumps([*allowed]))
    found, _ = compare(directory)
    assert {token for step in found for draft in step for token in draft} <= {*allowed}


@pytest.mark.parametrize("rules", OTHERS)
def test_other_sequences_are_drafted_in_separate_passes(tiny_model_dir, rules):
    _, calls = compare(tiny_model_dir, [*PLAIN, rules])
    assert calls == [[0, 1, 2], [0, 1, 2]]


FAMILIES = ["gemma2", "stablelm", "olmoe", "deepseek-v3"]
"""Scaled embeddings, norms with means, experts, latents."""


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(tmp_path, family):
    save_family(tmp_path, family)
    train_tokenizer(383).save_pretrained(tmp_path)
    _, calls = compare(tmp_path)
    has_plain_head = family != "gemma2"  # whose logits are bounded
    assert calls == ([[0, 1, 2], [0, 1, 2]] if has_plain_head else [])


def test_ranks_that_share_memory_draft_the_same(tiny_model_dir, tmp_path):
    address = tmp_path / "address"
    found = results(run_processes(2, rank_drafts, tiny_model_dir, [*PLAIN, *NO_CUT], address))
    expected, _ = drafts(load_runner(tiny_model_dir), [*PLAIN, *NO_CUT])
    whole = [[0, 1, 3, 4, 5]] * 2  # top_k cuts the logits of all ranks
    assert found == [(expected, whole)] * 2


def test_ranks_with_another_all_reduce_draft_in_passes(tiny_model_dir):
    found = run_ranks(2, lambda group: drafts(load_runner(tiny_model_dir, group), PLAIN))
    expected, _ = drafts(load_runner(tiny_model_dir), PLAIN)
    assert found == [(expected, [])] * 2


def test_a_draft_ends_where_logits_are_not_numbers(tiny_model_dir):
    runner = load_runner(tiny_model_dir)
    runner.model.torch_decoder.norm.weight.fill_(torch.nan)
    found, _ = drafts(runner, PLAIN)
    assert found == [[(), (), ()]] * 2
