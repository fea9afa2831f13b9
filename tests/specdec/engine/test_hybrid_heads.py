"""MTP layers and draft heads of models with recurrent layers draft, and change no token."""

import random
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from specdec.config.engine import AdapterLimits
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.model_limits import check_model_limits
from specdec.engine.models.model_report import Fit, Precision, report_model
from specdec.engine.models.model_resolution import Models
from specdec.kernels import backend
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError
from specdec.worker import LocalTarget, RankModel, load_target
from specdec.worker.loading import HeadFiles
from tests.specdec.adapters import ALL_LINEAR, HEAD_MODULES, adapter_dir, merged_dir
from tests.specdec.engine.test_hybrids import POISON, SMALL_POOL, hybrid_config, requests
from tests.specdec.engines import (
    load_adapter,
    local_engine,
    make_engine,
    tokens_by,
    with_adapter,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.passes import weights_of
from tests.specdec.threads import num_threads
from tests.specdec.tiny import train_tokenizer

QUICK = "qwen3-next"
SLOW = ("qwen3.5", "qwen3.5-moe")
HEADS_OF_OTHER_FILES = [name for name in HEADS if name not in ("mtp", "colocated_draft_model")]
ADAPTED = [name for name in (*HEADS_OF_OTHER_FILES, "mtp") if name != "eagle3"]


def save_mtp(directory, texts):
    """Write an MTP layer, which is the last one with attention, whose output the token decides.

    It guesses the token that most often follows in `texts`.
    """
    path, config = directory / "model.safetensors", ModelConfig.from_directory(directory)
    stored = load_file(path)
    attending = max(set(range(config.num_layers)) - config.recurrent.layers)
    prefix = f"model.layers.{attending}."
    tensors = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": tensor.clone()
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.02
    pairs = {pair for text in texts for pair in pairwise(text)}
    tokens, following = torch.tensor(sorted(pairs)).t()
    embedded = F.normalize(stored["model.embed_tokens.weight"], dim=1)[tokens]
    wanted = F.normalize(stored["lm_head.weight"], dim=1)[following]
    found = torch.linalg.lstsq(embedded, wanted).solution.t()
    tensors["mtp.fc.weight"] = torch.cat([found, torch.zeros_like(found)], 1)
    size = config.hidden_size
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(size)
    save_file(stored | tensors, path, {"format": "pt"})


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def model(request, tmp_path_factory):
    """A directory with an MTP layer, and the tokens without drafts by temperature."""
    directory = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    train_tokenizer(383).save_pretrained(directory)
    expected = {
        temperature: tokens_by(local_engine(directory, hybrid_config(0)), requests(temperature))
        for temperature in (0.0, 0.8)
    }
    save_mtp(directory, texts_of(expected))
    return directory, expected


def texts_of(expected):
    """Return the prompts with the tokens of each temperature."""
    return [
        [*each.prompt, *known[each.request_id]]
        for known in expected.values()
        for each in requests()
    ]


def drafted(directory, temperature, group=None, num_nodes=0, *, method="mtp", head=None, **changes):
    """Return the tokens with drafts, and the counts. num_nodes: of trees.

    head: directory of a head of `method`; None for the MTP layer in `directory`.
    """
    speculation = SpeculativeConfig.of(
        method=method, num_speculative_tokens=3, model="given", num_draft_tree_tokens=num_nodes
    )
    config = hybrid_config(speculation=speculation, num_draft_tokens=3, **changes)
    engine = local_engine(directory, config, group, head=HeadFiles(head or directory))
    return tokens_by(engine, requests(temperature)), engine.stats().counts


@pytest.mark.parametrize(
    "changes",
    [
        SMALL_POOL,
        {"async_scheduling": True},
        {"num_nodes": 8},
        pytest.param({"num_nodes": 8, "async_scheduling": True}, marks=pytest.mark.slow),
    ],
    ids=["small", "async", "trees", "async-trees"],
)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_drafts_change_no_token(model, temperature, changes):
    directory, expected = model
    found, counts = drafted(directory, temperature, **changes)
    assert found == expected[temperature]
    speculation = counts.speculation
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    assert counts.num_preemptions > 0 or changes != SMALL_POOL


def test_the_report_and_the_plan_have_the_layer(model):
    directory, _ = model
    report = report_model(directory, Precision("float32", None, is_native=False), 1)
    fits = {each.method: each.fit for each in report.methods}
    assert (fits["mtp"], fits["eagle3"]) == (Fit.READY, Fit.NEEDS_FILES)
    assert fits["colocated_draft_model"] is Fit.NO
    assert report.checkpoint.faults == ()
    limits = {"mtp": None, "eagle3": None, "colocated_draft_model": "draft_model: beside recurrent"}
    for method, limit in limits.items():
        speculation = SpeculativeConfig.of(method=method, model=str(directory))
        config = LLMConfig(model=str(directory), speculative_config=speculation)
        models = Models(report.config, head=None)
        with nullcontext() if limit is None else pytest.raises(InvalidValueError, match=limit):
            check_model_limits(config, models)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle3", SMALL_POOL),
        ("dflash", {"async_scheduling": True, "num_nodes": 8}),
        *(
            pytest.param(method, changes, marks=pytest.mark.slow)
            for method in HEADS_OF_OTHER_FILES
            for changes in (SMALL_POOL, {"async_scheduling": True}, {"num_nodes": 8})
        ),
    ],
)
def test_other_heads_change_no_token(model, tmp_path, method, changes):
    directory, expected = model
    head = HEADS[method](directory, tmp_path, texts_of(expected))
    found, counts = drafted(directory, 0.8, method=method, head=head, **changes)
    assert found == expected[0.8]
    assert counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ADAPTED)]
)
def test_a_head_drafts_with_an_adapter_as_with_it_merged(model, tmp_path, method):
    directory, expected = model
    head, modules = directory, tuple(f"mtp.layers.0.{name}" for name in ALL_LINEAR)
    if method != "mtp":
        head, modules = HEADS[method](directory, tmp_path, texts_of(expected)), HEAD_MODULES
    adapter = adapter_dir(tmp_path / "adapter", head, modules=modules)
    merged = merged_dir(tmp_path / "merged", head, adapter)
    speculation = SpeculativeConfig.of(method=method, num_speculative_tokens=3, model="given")

    def drafted_by(head, adapter):
        config = hybrid_config(3, speculation=speculation, adapters=AdapterLimits(2, 8, 4))
        engine = local_engine(directory, config, head=HeadFiles(head))
        asked, plain = requests(0.0), requests(0.0, count=2)
        if adapter is not None:
            load_adapter(engine, "draft", None, draft=adapter)
            asked = [with_adapter(engine, each, "draft") for each in asked]
        assert tokens_by(engine, asked) == expected[0.0]
        found = engine.stats().counts.speculation
        assert tokens_by(engine, plain).items() <= expected[0.0].items()
        return found

    found = drafted_by(head, adapter)
    assert found == drafted_by(merged, None) != drafted_by(head, None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
@pytest.mark.parametrize("family", [name for name in HYBRIDS if name not in (QUICK, *SLOW)])
def test_heads_read_the_layers_of_every_family(tmp_path, family, method):
    directory = tmp_path / "model"
    save_family(directory, family)
    train_tokenizer(383).save_pretrained(directory)
    expected = {0.8: tokens_by(local_engine(directory, hybrid_config(0)), requests(0.8))}
    head = HEADS[method](directory, tmp_path / "head", texts_of(expected))
    found, counts = drafted(directory, 0.8, method=method, head=head, **SMALL_POOL)
    assert found == expected[0.8]
    assert counts.speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_change_no_token(model, size):
    directory, expected = model
    found = run_ranks(size, lambda group: drafted(directory, 0.8, group)[0])
    assert found == [expected[0.8]] * size


def poisoned(runner, generator):
    """Let the head draft a token with NaN at times."""
    weights_of(runner.model).embed_tokens.weight[POISON] = torch.nan
    draft = runner.head.draft

    def draft_some(*arguments):
        return tuple(
            row._replace(next_draft_token_ids=(POISON, *row.next_draft_token_ids[1:]))
            if row.next_draft_token_ids and generator.random() < 0.15
            else row
            for row in draft(*arguments)
        )

    runner.head.draft = draft_some


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 8))]
)
def test_a_row_with_nan_is_computed_again_while_others_are_in_flight(model, monkeypatch, seed):
    directory, _ = model
    monkeypatch.setattr(backend, "native_library", lambda: None)  # they drop the draft alone
    asked = requests(0.8, logit_bias={POISON: -100.0})
    expected = tokens_by(local_engine(directory, hybrid_config(0)), asked)
    speculation = SpeculativeConfig.of("mtp", 3, model="given")
    config = hybrid_config(3, speculation=speculation, async_scheduling=True, max_num_seqs=3)
    runner = load_target(
        RankModel(directory, "float32", config, head=HeadFiles(directory)), TensorParallelGroup()
    )
    poisoned(runner, random.Random(seed))
    engine = make_engine(directory, config, LocalTarget(runner))
    assert tokens_by(engine, asked) == expected
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert counts.num_steps_ahead > 0


@pytest.mark.slow
@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_threads_share_the_memory_of_drafts_with_experts(model):
    directory, expected = model
    for _ in range(20):
        with num_threads(3):
            found, _ = drafted(directory, 0.0)
        assert found == expected[0.0]
