# Modules: specdec.engine.rank_updates
"""The real engine while its draft head is replaced: no token changes, and acceptance follows."""

import itertools
import json
import re
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.kernels.cpu import native_library
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.policy.rollback import RollbackRule
from specdec.types.control import SpeculationControl
from specdec.types.drafters import HeadFile
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS

K = 3
NUM_SWITCHES = 10
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
FAST = [("medusa", "torch"), ("eagle3", KERNELS[-1])]
HEADS_AND_KERNELS = [
    pytest.param(method, kernels, marks=[] if (method, kernels) in FAST else pytest.mark.slow)
    for method in HEADS
    for kernels in KERNELS
]
STREAMS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.2},
]


def requests(**params):
    """Return 8 requests, greedy and sampled."""
    return [
        request(
            f"r{i}",
            [(29 * i + 31 * place) % 380 + 3 for place in range(9 + 2 * i)],
            seed=i,
            max_tokens=60,
            **{**STREAMS[i % len(STREAMS)], **params},
        )
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    return tokens_by(local_engine(tiny_model_dir, engine_config(0)), requests())


@pytest.fixture(scope="module")
def head_dirs(tiny_model_dir, tmp_path_factory, expected):
    """Return a function from a method to a fitted head, and the same with noise as weights."""
    texts = [[*each.prompt, *expected[each.request_id]] for each in requests()]

    @cache
    def make(method):
        fitted = HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), texts)
        return fitted, noise_of(fitted, tmp_path_factory.mktemp("noise"))

    return make


def noise_of(head_dir, directory):
    """Copy a head with each matrix replaced by noise of the same size."""
    shutil.copytree(head_dir, directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(3)

    def noise(tensor):
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        return torch.randn(tensor.shape, generator=generator) * tensor.float().std()

    save_file({name: noise(each) for name, each in load_file(path).items()}, path)
    return directory


def engine_with(directory, head_dir, method, kernels="auto", rule=None, group=None, **changes):
    speculation = SpeculativeConfig.of(method, K, model=str(head_dir))
    config = engine_config(speculation=speculation, **{"async_scheduling": True, **changes})
    return local_engine(
        directory,
        config,
        group,
        policy=SpeculationPolicy(SpeculationControl("on", 32, K), clock=lambda: 0.0),
        head=HeadFiles(head_dir),
        kernels=kernels,
        drafters=DrafterVersions(HeadFile(1, "configured", str(head_dir)), rule),
    )


def run_with_switches(engine, asked, heads):
    """Run requests with a switch after each step that follows one; return their tokens."""
    tokens = {each.request_id: [] for each in asked}
    for each in asked:
        engine.add(each)
    paths = itertools.cycle(heads)
    while engine.has_work:
        if engine.drafters.is_settled and engine.drafters.active <= NUM_SWITCHES:
            path = str(next(paths))
            engine.drafters.load(path, path)
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize(("method", "kernels"), HEADS_AND_KERNELS)
def test_switches_change_no_token_of_8_streams(
    tiny_model_dir, head_dirs, expected, method, kernels
):
    fitted, noise = head_dirs(method)
    engine = engine_with(tiny_model_dir, fitted, method, kernels)
    tokens = run_with_switches(engine, requests(), (noise, fitted))
    assert tokens == expected
    assert engine.drafters.active == NUM_SWITCHES + 1
    counts = engine.stats().counts
    assert counts.num_steps_ahead > 0
    drafts = counts.drafts_by_version.values()
    assert sum(each.num_drafts for each in drafts) <= counts.speculation.num_drafts


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_versions_with_other_draft_tokens_change_no_token(tiny_model_dir, tmp_path, method):
    """Two versions have half of their draft tokens in common, at other places."""
    asked = requests(temperature=0.8)
    expected = tokens_by(local_engine(tiny_model_dir, engine_config(0)), asked)
    texts = [[*each.prompt, *expected[each.request_id]] for each in asked]
    fitted = HEADS[method](tiny_model_dir, tmp_path / "fitted", texts)
    first, second = (
        with_draft_tokens(fitted, tmp_path / str(each), each) for each in (False, True)
    )
    engine = engine_with(tiny_model_dir, first, method)
    assert run_with_switches(engine, asked, (second, first)) == expected
    drafts = engine.stats().counts.drafts_by_version
    assert engine.drafters.active == NUM_SWITCHES + 1
    for number in range(2):
        own = [each for name, each in drafts.items() if int(name) % 2 == number]
        rate = sum(each.num_accepted_tokens for each in own) / sum(
            each.num_draft_tokens for each in own
        )
        assert rate > 0.05, "with the map of the other version it is below 0.03"


def with_draft_tokens(head_dir, directory, is_late):
    """Copy a head with the first two thirds of its draft tokens, or with the last two."""
    shutil.copytree(head_dir, directory)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    own = torch.arange(config["vocab_size"])
    if "d2t" in tensors:
        own = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    third = len(own) // 3
    places = torch.arange(2 * third) + (third if is_late else 0)
    ids = own[places]
    for name in [each for each in tensors if "lm_head" in each]:
        tensors[name] = tensors[name][places].clone()
    if "d2t" in tensors:
        tensors["d2t"] = ids - torch.arange(len(ids))
        config["draft_vocab_size"] = len(ids)
    else:
        tensors["token_map"] = ids
        config["truncated_vocab_size"] = len(ids)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("method", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_the_shards_of_two_ranks_switch_together(tiny_model_dir, head_dirs, expected, method):
    """Each rank is a thread with a whole engine, so a rank that differed would stop the others."""
    fitted, noise = head_dirs(method)

    def outcome(group):
        engine = engine_with(tiny_model_dir, fitted, method, "torch", group=group)
        return run_with_switches(engine, requests(), (noise, fitted)), engine.stats().counts

    (tokens, counts), (others, other_counts) = run_ranks(2, outcome)
    assert tokens == others == expected
    assert counts.drafts_by_version == other_counts.drafts_by_version
    assert max(map(int, counts.drafts_by_version)) == NUM_SWITCHES + 1


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_draft_counts_for_the_version_that_made_it(
    tiny_model_dir, head_dirs, expected, async_scheduling
):
    fitted, noise = head_dirs("medusa")
    changes = {"async_scheduling": async_scheduling}
    engine = engine_with(tiny_model_dir, fitted, "medusa", **changes)
    for each in requests():
        engine.add(each)
    for _ in range(6):
        engine.step()
    engine.drafters.load("noise", str(noise))
    engine.step()
    before = engine.stats().counts.drafts_by_version
    while engine.has_work:
        engine.step()
    after = engine.stats().counts.drafts_by_version
    assert after["1"].acceptance_rate > 3 * after["2"].acceptance_rate
    assert before["2"].num_drafts == 0, "the switch came before the step that drafts with it"
    late = after["1"].minus(before["1"])
    assert late.num_drafts <= 2 * len(requests()), "only drafts in flight are older"
    total = after["1"].plus(after["2"])
    assert total == engine.stats().counts.speculation


def test_a_version_of_noise_is_rolled_back(tiny_model_dir, head_dirs, expected):
    fitted, noise = head_dirs("eagle3")
    engine = engine_with(tiny_model_dir, fitted, "eagle3", rule=RollbackRule(min_drafts=32))
    for each in requests():
        engine.add(each)
    while engine.stats().counts.speculation.num_drafts < 64:
        engine.step()
    engine.drafters.load("noise", str(noise))
    while engine.has_work:
        engine.step()
    first, second = engine.drafters.snapshot()
    assert (first.state.value, second.state.value) == ("active", "rolled_back")
    stats = engine.stats()
    assert (stats.drafter_version, stats.counts.num_drafter_rollbacks) == (1, 1)
    assert second.speculation.num_drafts < 32 + 4 * len(requests())


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_another_verifier_takes_drafts_across_a_switch(tiny_model_dir, head_dirs, verifier):
    fitted, noise = head_dirs("medusa")
    engine = engine_with(tiny_model_dir, fitted, "medusa")
    tokens = run_with_switches(
        engine, requests(speculation=SpeculationOptions(verifier=verifier)), (noise, fitted)
    )
    assert {len(each) for each in tokens.values()} == {60}
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"damaged"), "model.safetensors"),
        (lambda path: shutil.rmtree(path), "No such file"),
        (lambda path: spoil(path, float("nan")), "NaN or infinite"),
        (lambda path: spoil(path, float("inf")), "NaN or infinite"),
    ],
    ids=["damaged", "missing", "NaN", "infinite"],
)
def test_files_that_cannot_be_used_change_nothing(
    tiny_model_dir, head_dirs, expected, tmp_path, change, fault
):
    fitted, _ = head_dirs("medusa")
    other = tmp_path / "other"
    shutil.copytree(fitted, other)
    change(other)
    engine = engine_with(tiny_model_dir, fitted, "medusa")
    engine.drafters.load("other", str(other))
    assert tokens_by(engine, requests()) == expected
    assert engine.drafters.active == 1
    assert engine.drafters.snapshot()[1].state.value == "failed"
    assert re.search(fault, engine.drafters.snapshot()[1].fault)


def spoil(directory, value):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = value
    save_file(tensors, path)


def test_a_head_of_another_method_or_size_is_refused(tiny_model_dir, head_dirs, expected):
    medusa, eagle3 = head_dirs("medusa")[0], head_dirs("eagle3")[0]
    engine = engine_with(tiny_model_dir, medusa, "medusa")
    engine.drafters.load("eagle3", str(eagle3))
    assert tokens_by(engine, requests()) == expected
    assert "a version of the served head must be medusa" in engine.drafters.snapshot()[1].fault
