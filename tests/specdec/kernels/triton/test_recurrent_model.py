"""Models with recurrent layers on Triton's kernels: their tokens are those of torch's."""

import random
from dataclasses import replace

import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from tests.specdec.engine.test_hybrid_heads import save_mtp
from tests.specdec.engines import (
    ScriptedProposer,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import mixed_logits
from tests.specdec.tiny import train_tokenizer
from tests.specdec.worker.device.runners import FakeGraphs, device_target, recorded_device_steps

IDS = ([(5 * i) % 300 for i in range(34)], [(7 * i) % 300 for i in range(27)])
FAMILIES = ("lfm2", "qwen3-next", "granite-4", "kimi-linear", "jamba", "falcon-h1", "nemotron-h")
NUM_TOKENS, NUM_DRAFTS = 8, 3
TOLERANCES = {torch.float32: 2e-4, torch.float16: 6e-2}


@pytest.fixture(scope="module", params=["lfm2", "qwen3-next", "jamba"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    train_tokenizer(383).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *((family, torch.float16) for family in ("lfm2", "kimi-linear", "falcon-h1")),
    ],
)
def test_logits_of_families_equal_torch(tmp_path, family, dtype):
    """Together they have every recurrence; the logits are of chunks, decodes and several rows."""
    save_family(tmp_path, family)
    found, expected = (
        mixed_logits(tmp_path, IDS, TensorParallelGroup(), dtype, kernels=name, lengths=(15, 12))
        for name in ("triton", "torch")
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def config_of(num_drafts=0, **changes):
    own = {"keeps_guesses": True, "num_snapshots": 6, "snapshot_interval": 4, "max_num_seqs": 2}
    return engine_config(num_drafts, **(own | changes))


def requests():
    generator = random.Random(3)
    pieces = [[generator.randrange(3, 383) for _ in range(5)] for _ in range(2)]
    return [
        request(f"r{i}", piece * 2, seed=i, temperature=0.8 * (i % 2), max_tokens=NUM_TOKENS)
        for i, piece in enumerate(pieces)
    ]


def continuations(expected):
    """Return a request that continues an earlier one, from a snapshot of its states."""
    first = requests()[0]
    text = (*first.prompt, *expected[first.request_id], 7)
    return [
        replace(first, request_id="again", prompt=text, params=replace(first.params, max_tokens=4))
    ]


def guesses(texts):
    """Return a proposer of drafts from known texts, most of them with a wrong token."""
    generator = random.Random(1)

    def draft(token_ids, most):
        text = next((each for each in texts if each[: len(token_ids)] == token_ids), [])
        found = text[len(token_ids) :][: generator.randrange(most + 1)]
        if found and generator.random() < 0.6:
            place = generator.randrange(len(found))
            found[place] = (found[place] + 1) % 383
        return found

    return ScriptedProposer(draft)


@pytest.fixture(scope="module")
def expected(directory):
    """Return torch's tokens without drafts."""
    config = config_of(0, enable_prefix_caching=False)
    engine = local_engine(directory, config, kernels="torch")
    first = tokens_by(engine, requests())
    return first, tokens_by(engine, continuations(first))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_drafts", "runs_ahead"), [(0, True), (NUM_DRAFTS, False), (NUM_DRAFTS, True)]
)
def test_tokens_of_steps_on_the_device_equal_torch(
    directory, expected, monkeypatch, num_drafts, runs_ahead
):
    """Rows are prompts, decodes and drafts of random acceptance, and prompts that resume."""
    steps = recorded_device_steps(monkeypatch)
    first, second = expected
    config = config_of(num_drafts, async_scheduling=runs_ahead)
    target = device_target(
        directory, config, kernels="triton", graphs=FakeGraphs() if runs_ahead else None
    )
    asked, again = requests(), continuations(first)
    texts = [[*each.prompt, *first[each.request_id]] for each in asked]
    texts += [[*each.prompt, *second[each.request_id]] for each in again]
    engine = make_engine(directory, config, target, guesses(texts) if num_drafts else None)
    assert tokens_by(engine, asked) == first
    assert tokens_by(engine, again) == second
    assert len(steps) == engine.stats().counts.num_steps
    assert engine.stats().counts.num_resumed_tokens > 0
    assert (engine.stats().counts.speculation.num_accepted_tokens > 0) == (num_drafts > 0)


@pytest.mark.slow
def test_the_device_drafts_with_an_mtp_layer_for_steps_begun_ahead(tmp_path):
    """A step takes the drafts that the device holds, of which the host knows none."""
    save_family(tmp_path, "qwen3-next")
    train_tokenizer(383).save_pretrained(tmp_path)
    asked = [replace(each, params=replace(each.params, max_tokens=5)) for each in requests()[:1]]
    expected = tokens_by(local_engine(tmp_path, config_of(0), kernels="torch"), asked)
    text = [*asked[0].prompt, *expected[asked[0].request_id]]
    save_mtp(tmp_path, [text])
    speculation = SpeculativeConfig.of("mtp", NUM_DRAFTS, model="given")
    config = config_of(NUM_DRAFTS, speculation=speculation, async_scheduling=True)
    target = device_target(tmp_path, config, kernels="triton", head=tmp_path)
    engine = make_engine(tmp_path, config, target)
    assert tokens_by(engine, asked) == expected
    assert engine.stats().counts.speculation.num_accepted_tokens > 0
