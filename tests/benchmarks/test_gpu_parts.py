"""The parts of the GPU check on the CPU in small shapes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import (
    determinism,
    device_kernels,
    drafting,
    equality,
    extras,
    formats,
    host_parts,
    profiled,
    prompts,
    ranks,
    steps,
    trees,
)
from benchmarks.gpu.drafting import measure_draft_model, measure_head
from benchmarks.gpu.hybrid import measure_hybrid
from benchmarks.gpu.mixture import measure_mixture
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import Context, PartReport, PartSkippedError
from benchmarks.gpu.profiled import profile
from benchmarks.gpu.random_models import random_decoder
from benchmarks.gpu.steps import aims, measure_grid, measure_main_steps
from benchmarks.gpu.throughput import compare_speculation, compare_transformers
from benchmarks.gpu_check import PARTS
from benchmarks.tiny_model import write_tiny_llama
from specdec.kernels.collectives import OneShotCollectives
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.row_ops import RowOps
from tests.specdec.fakes import run_ranks
from tests.specdec.kernels.test_collectives import ThreadCollectives, memory_of


@pytest.fixture
def small(tmp_path, monkeypatch):
    for module in (drafting, profiled, steps):
        monkeypatch.setattr(module, "_ROUNDS", 1)
    monkeypatch.setattr(steps, "bandwidth", lambda device: 1e11)  # test_gpu_checks measures it
    return Context(torch.device("cpu"), tmp_path, is_small=True)


def test_the_parts_are_complete():
    assert [part.name for part in PARTS if not part.needs_gpu] == [
        *("checks", "equality of n-gram", "equality of drafters", "equality of features"),
        *("equality of formats", "steps", "memory plans", "counts", "compilation", "kernels"),
    ]
    assert len(PARTS) == 36
    groups = (equality.NGRAM, equality.DRAFTERS, equality.FEATURES, equality.FORMATS)
    compared = [name for select in groups for name in select]
    assert sorted(compared) == sorted(case.name for case in equality.cases())


def test_a_grid_has_steps_and_their_floor(small):
    found = measure_grid(small)
    greedy = [cell for cell in found["cells"] if cell["rules"] == "greedy"]
    assert {(cell["batch"], cell["num_drafts"]) for cell in greedy} == {
        (batch, drafts) for batch in (1, 2) for drafts in (0, 3)
    }
    assert {cell["rules"] for cell in found["cells"]} == {"greedy", "sampled", "truncated"}
    assert all(cell["step_ms"] > cell["floor_ms"] > 0 for cell in found["cells"])
    for cell in found["cells"]:
        assert (cell["ahead_ms"] is None) == (cell["num_drafts"] > 0)
    assert found["graphs"].startswith("no graphs")


def test_the_page_has_steps_and_speculation():
    ahead = {"context": 1024, "batch": 1, "num_drafts": 0, "rules": "greedy"}
    ahead |= {"step_ms": 6.0, "ahead_ms": 5.5, "floor_ms": 5.0, "ratio": 1.2}
    drafted = ahead | {"num_drafts": 7, "ahead_ms": None}
    plain, policy = {"tokens_per_s": 150.4}, {"drafts_per_row": 4.86}
    speculation = {"ratios": {1: 3.0}, "policy_ratios": {1: 2.9}}
    rates = {"none": {1: plain}, "policy": {1: policy}}
    report = PartReport(None, {"device": "cpu", "torch": "2"})
    report.add("main steps", {"cells": [ahead, drafted], "seconds": 1.0})
    report.add("speculation", speculation | {"rates": rates, "seconds": 1.0})
    lines = page(report).splitlines()
    assert "| greedy | 1024 | 1 | 5.00 | 5.50 | 6.00 | 6.00 |" in lines
    assert "| 1 | 150 | 3.00 | 2.90 | 4.9 |" in lines


def test_main_steps_are_measured_and_profiled(small):
    found = measure_main_steps(small)
    first = found["cells"][0]
    assert (first["batch"], first["num_drafts"], first["rules"]) == (1, 0, "greedy")
    assert set(found["profiles"]) == {
        f"batch {batch}, {drafts} drafts, {how}"
        for batch in (1, 2)
        for drafts in (0, 3)
        for how in ("graphs", "operators")
    }
    for each in found["profiles"].values():
        assert 0 < each["begin_ms"] <= each["step_ms"]
        assert each["kernels"]


def test_prompts_beside_decodes_are_measured(small):
    found = prompts.measure_prompts(small)
    assert [(each["batch"], each["num_drafts"]) for each in found["prompt_cells"]] == [
        (2, 0),
        (2, 2),
    ]
    for each in found["prompt_cells"]:
        assert min(each["decode_ms"], each["device_ms"], each["host_ms"]) > 0
    assert list(found["aims"]) == ["prompt of 16 beside 2 decodes, times these"]
    report = PartReport(None, {"device": "cpu", "torch": "2"})
    report.add("prompts", found | {"seconds": 1.0})
    assert "## Steps of 8B with a prompt" in page(report)


def test_trees_are_measured_beside_chains(small):
    found = trees.measure_trees(small)
    assert found["passed"]
    assert [(each["batch"], each["num_nodes"]) for each in found["tree_cells"]] == [(1, 5), (2, 5)]
    for each in found["tree_cells"]:
        assert min(each["chain_ms"], each["device_ms"], each["host_ms"]) > 0
    assert list(found["aims"]) == ["tree of 5 at batch 1, times the chain"]
    report = PartReport(None, {"device": "cpu", "torch": "2"})
    report.add("trees", found | {"seconds": 1.0})
    assert "## Steps of 8B with trees" in page(report)


def test_steps_of_other_number_formats_are_measured(small, monkeypatch):
    kept = {name: formats.FORMATS[name] for name in ("16 bits", "KV in fp8", "weights in int4")}
    monkeypatch.setattr(formats, "FORMATS", kept)
    monkeypatch.setattr(formats, "FEW", replace(steps.FEW, batches=(1,)))
    monkeypatch.setattr(steps, "bandwidth", lambda device: 1e9)
    found = formats.measure_formats(small)["formats"]
    assert list(found) == list(kept)
    assert "int4 needs Triton" in str(found.pop("weights in int4"))
    for cells in found.values():
        assert [(each["batch"], each["num_drafts"]) for each in cells] == [(1, 0), (1, 3)]
    wide, narrow = (found[name][-1]["floor_ms"] for name in ("16 bits", "KV in fp8"))
    assert narrow < wide


def test_requests_of_some_sequences_are_measured(small):
    found = extras.measure_extras(small)
    cells = found["extras_cells"]
    assert [(each["request"], each["num_rows"]) for each in cells] == [
        ("none", 0),
        *(
            (name, rows)
            for rows in (1, 2)
            for name in ("penalties", "log-probabilities", "grammar")
        ),
    ]
    assert all(min(each["device_ms"], each["host_ms"]) > 0 for each in cells)
    assert list(found["aims"]) == ["one request in 2, times a step without"]
    report = PartReport(None, {"device": "cpu", "torch": "2"})
    report.add("penalties, grammars, log-probabilities", found | {"seconds": 1.0})
    assert "by requests of some sequences" in page(report)


def test_edits_of_logits_are_compared(small, monkeypatch):
    monkeypatch.setattr(device_kernels, "triton_fault", lambda device: None)
    assert extras.check_edits(small) == {"passed": True, "num_differing": 0}
    edited, calls = RowOps.edit, []

    def wrong(ops, logits, *arguments):
        edited(ops, logits, *arguments)
        calls.append(logits[0, 3].mul_(len(calls)))

    monkeypatch.setattr(RowOps, "edit", wrong)
    assert not extras.check_edits(small)["passed"]

    def with_other_nan(ops, logits, *arguments):
        edited(ops, logits, *arguments)
        is_nan = logits.isnan()
        assert is_nan.any()
        calls.append(logits.view(torch.int32)[is_nan].add_(len(calls)))
        logits.view(torch.int32)[is_nan] = calls[-1]

    monkeypatch.setattr(RowOps, "edit", with_other_nan)
    assert extras.check_edits(small)["passed"]


def test_ranks_have_the_tokens_of_one(tmp_path):
    rank = ranks._Rank(0, "cpu", tmp_path, write_tiny_llama(tmp_path))
    alone = ranks._tokens(rank, TensorParallelGroup(), enforce_eager=True)
    assert [len(each) for each in alone] == [24] * 8
    found = run_ranks(2, lambda group: ranks._tokens(rank, group, enforce_eager=True))
    assert found == [alone] * 2


@pytest.mark.slow
def test_two_ranks_are_compared_with_one(small, tmp_path):
    """On a CPU, in shared memory or by Gloo; sums of GPUs are not measured there."""
    found = ranks.compare_ranks(small)
    assert found["passed"], found
    assert found["exchange"] in ("shared memory", "Gloo")
    assert found["sums"] == []
    assert set(found["differing"].values()) == {0.0}
    with pytest.raises(PartSkippedError, match="needs 2 GPUs, of which 0 are here"):
        ranks.compare_ranks(Context(torch.device("cpu"), tmp_path))


def test_sums_of_ranks_are_timed_and_compared():
    def on_rank(group):
        others = ThreadCollectives(group)
        memory = memory_of(group, max_bytes=2**20)(torch.zeros(2**20, dtype=torch.uint8), "0")
        return ranks._sums(OneShotCollectives(others, memory), torch.device("cpu"))

    first, _ = run_ranks(2, on_rank)
    assert [(each["dtype"], each["bytes"]) for each in first[::4]] == [
        ("bfloat16", 8192),
        ("float32", 8192),
    ]
    assert all(each["differing_bits"] == 0 for each in first)
    assert all(min(each["one_shot_us"], each["nccl_us"]) > 0 for each in first)
    report = PartReport(None, {"device": "two", "torch": "2"})
    report.add("ranks", {"passed": True, "sums": first, "seconds": 1.0})
    assert "| bfloat16 | 8 |" in page(report)


def test_deterministic_mode_is_measured_where_triton_runs(small, monkeypatch):
    monkeypatch.setattr(device_kernels, "triton_fault", lambda device: None)
    monkeypatch.setattr(determinism, "random_decoder", plain_decoder)
    found = determinism.measure_deterministic(small)
    assert set(found["differing_bits"]) == {"beside others", "in two steps", "token by token"}
    assert found["passed"] == (not any(found["differing_bits"].values()))
    assert len(found["ratios"]) == len(found["cells"]) == 4
    assert found["aims"]["deterministic, times a step"]["value"] == max(found["ratios"])
    monkeypatch.setattr(device_kernels, "triton_fault", lambda device: "no Triton")
    with pytest.raises(PartSkippedError, match="no Triton"):
        determinism.measure_deterministic(small)


def plain_decoder(*arguments, deterministic):
    """Return a decoder on torch's kernels, in place of Triton's in the interpreter."""
    return random_decoder(*arguments)


def test_aims_are_derived_from_their_cells():
    def cell(batch, context, drafts, ms, ratio, rules="greedy", ahead_ms=None):
        return {
            "batch": batch,
            "context": context,
            "num_drafts": drafts,
            "rules": rules,
            "step_ms": ms,
            "floor_ms": ms / ratio,
            "ahead_ms": ahead_ms,
            "ratio": ratio,
        }

    found = aims(
        [
            cell(1, 1024, 0, 4.0, 1.25, ahead_ms=3.84),
            cell(1, 1024, 7, 4.4, 1.3),
            cell(64, 4096, 0, 9.0, 1.4),
            cell(1, 1024, 0, 4.2, 1.3, "sampled"),
        ]
    )
    values = {name: each["value"] for name, each in found.items()}
    assert values == {
        "batch 1, times the floor": pytest.approx(1.2),
        "eight rows, times a step": pytest.approx(1.1),
        "batch 64 at 4k, times the floor": 1.4,
        "sampled, times greedy": pytest.approx(1.05),
    }
    assert aims([]) == {}


def test_drafts_are_measured(small):
    assert set(measure_draft_model(small)["ms_per_token"]) == {1, 8}
    found = measure_head(small)
    assert found["passed"]
    assert set(found["ms_per_token"]) == set(found["medusa"]["ms_per_token"]) == {1, 8}
    assert found["trees of 24"]["batches"][1]["is_on_device"]
    assert "level of a tree of 24 of an EAGLE-3 head, ms" in found["aims"]


def test_a_mixture_is_measured_beside_the_experts_that_it_reads(small):
    cells = measure_mixture(small)["cells"]
    assert [(each["batch"], each["num_drafts"]) for each in cells] == [
        (batch, count) for batch in (1, 2) for count in (0, 3)
    ]
    floors = [each["floor_ms"] for each in cells]
    assert 0 < floors[0] < floors[1] < floors[3]


def test_a_hybrid_is_measured_beside_the_memory_of_its_states(small):
    found = measure_hybrid(small)
    assert [
        (each["batch"], each["num_drafts"], each["num_replayed"]) for each in found["cells"]
    ] == [(batch, *each) for batch in (1, 2) for each in ((0, 0), (3, 0), (3, 3))]
    floors = [each["floor_ms"] for each in found["cells"]]
    assert 0 < floors[0] < floors[3]
    assert [each["at_most"] for each in found["aims"].values()] == [1.35, 1.2, 1.2]


@pytest.mark.slow
def test_throughput_is_compared(small):
    found = compare_speculation(small)
    assert set(found["ratios"]) == {1, 2}
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert set(found["policy_ratios"]) == {1, 2}
    fixed, plain = found["rates"]["fixed"][2], found["rates"]["none"][2]
    assert plain["drafts_per_row"] == 0 < fixed["drafts_per_row"] < 6
    assert 0 < fixed["begin_ms"] < fixed["step_ms"]
    assert 0 < fixed["engine_ms"] < fixed["step_ms"]
    assert compare_transformers(small)["ratio"] > 0


def test_memory_is_planned_for_common_gpus(small):
    plans = host_parts.plan_memory(small)["plans"]
    h100 = plans["H100, 80 GB"]
    assert h100["tokens_alone"] > h100["tokens_with_draft"] > 8192
    assert plans["H200, 141 GB"]["tokens_alone"] > h100["tokens_alone"]


def test_tokens_differ_where_drafts_change_them(small, monkeypatch):
    generated = iter([([(1,)] * 8, 0), ([(2,)] * 8, 5)])
    monkeypatch.setattr(equality, "_generate", lambda *_, **__: next(generated))
    monkeypatch.setattr(equality, "cases", lambda: [equality.Case("one", {"method": "ngram"})])
    monkeypatch.setattr(equality, "NGRAM", ("one",))
    found = equality.compare_ngram(small)
    assert not found["passed"]
    assert found["cases"]["one"]["differing"] == 1.0


@pytest.mark.slow
def test_tokens_are_equal_on_the_cpu(small):
    for compare in (
        equality.compare_ngram,
        equality.compare_drafters,
        equality.compare_features,
    ):
        assert compare(small)["passed"]


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        *(("triton", part) for part in (host_parts.run_kernel_tests, host_parts.compile_kernels)),
        *((name, host_parts.run_kernel_tests) for name in ("pytest", "hypothesis", "xdist")),
        *((name, host_parts.count_operators) for name in ("pytest", "hypothesis", "xdist")),
    ],
)
def test_parts_without_a_package_are_skipped(small, monkeypatch, missing, part):
    monkeypatch.setattr(host_parts, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(PartSkippedError, match=f"{missing} is not installed"):
        part(small)


def test_an_older_triton_is_not_tested(small, monkeypatch):
    monkeypatch.setattr(host_parts, "find_spec", lambda name: name)
    triton = SimpleNamespace(__version__="3.6.0")
    monkeypatch.setattr(host_parts, "import_module", lambda name: triton)
    with pytest.raises(PartSkippedError, match=r"need Triton 3\.7, not 3\.6\.0"):
        host_parts.run_kernel_tests(small)


def test_a_module_that_fails_is_reported():
    found = host_parts._run("tokenize", "no/such/file.py")
    assert not found["passed"]
    assert "no/such/file.py" in found["output"]


def test_a_profile_has_the_operators_of_the_work():
    x = torch.ones(64, 64)
    found = profile(lambda: x @ x, torch.device("cpu"))
    assert found["launches"] >= 1
    assert any("mm" in name for name in found["kernels"])
