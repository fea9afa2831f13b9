# Modules: specdec.models.heads.formats.whole_model, specdec.models.heads.networks.whole_model
"""A draft model on the target's ranks: its drafts are those of a model that runs alone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, PairInputs
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import DeviceDrafts, first_slot
from specdec.models.loading import load_model
from specdec.types.errors import UnsupportedModelError
from specdec.worker import HeadFiles
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.models.heads.driver import BLOCK_SIZE, KERNELS
from tests.specdec.models.heads.native_drafts import params
from tests.specdec.tiny import tiny_llama_dir

PROMPTS = ([7, 9, 300, 12, 55], [301], [4, 4, 8, 15, 16, 23, 42, 99, 100])
NUM_DRAFTS = 4
METHOD = "colocated_draft_model"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return a target, and a draft model with another shape and fewer tokens."""
    make = tmp_path_factory.mktemp
    target = tiny_llama_dir(make("target"), vocab=383)
    return target, tiny_llama_dir(make("draft"), vocab=360, hidden=96, heads=6, layers=3, seed=4)


def loaded(directories, kernels="torch", group=None):
    target, draft = directories
    config = ModelConfig.from_directory(target)
    decoder = load_model(
        target,
        config,
        group or TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        kernels=kernels,
    )
    return load_head(HeadConfig.from_directory(draft, config, method=METHOD), decoder)


def drafted(head):
    """Return the greedy drafts after all prompts, token by token."""
    tables = [range(10 * index, 10 * index + 10) for index in range(len(PROMPTS))]
    chunks = [Chunk(tokens, 0, table) for tokens, table in zip(PROMPTS, tables, strict=True)]
    cache, found = head.new_kv_cache(30 * BLOCK_SIZE), []
    state = head.begin(ForwardBatch(chunks, BLOCK_SIZE), torch.empty(0, 0), cache, NUM_DRAFTS)
    for index in range(NUM_DRAFTS):
        own = head.logits(state, index)
        found.append(own.argmax(1).tolist())
        state = head.advance(state, found[-1], index)
    return [list(tokens) for tokens in zip(*found, strict=True)]


def reference_drafts(directory, prompts=PROMPTS):
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = model.config.vocab_size
    found = []
    for prompt in prompts:
        known = torch.tensor([[min(token, size - 1) for token in prompt]])
        for _ in range(NUM_DRAFTS):
            with torch.inference_mode():
                best = model(known).logits[0, -1].argmax()
            known = torch.cat([known, best[None, None]], 1)
        found.append(known[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_are_those_of_the_model_alone(directories, kernels):
    """From its first token on, which heads do not see."""
    head = loaded(directories, kernels)
    assert (first_slot(head), head.feature_size, head.taps) == (0, 0, ())
    assert (head.capabilities.on_device is DeviceDrafts.PAIRS) == (kernels == "torch")
    assert head.target_ids.tolist() == list(range(360))
    assert drafted(head) == reference_drafts(directories[1])


@pytest.mark.skipif(len(KERNELS) == 1, reason="no native kernels")
def test_a_whole_draft_has_the_same_tokens(directories):
    head = loaded(directories, "native")
    chunks = [Chunk(each, 0, range(9 * i, 9 * i + 9)) for i, each in enumerate(PROMPTS)]
    counts, cache = [NUM_DRAFTS, 0, 2], head.new_kv_cache(27 * BLOCK_SIZE)
    inputs = PairInputs(ForwardBatch(chunks, BLOCK_SIZE), torch.empty(0, 0), cache)
    found = head.draft(inputs, counts, params(0.0))
    expected = reference_drafts(directories[1])
    assert found == [own[:count] for own, count in zip(expected, counts, strict=True)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_the_draft_model(directories, size):
    def logits(group):
        head = loaded(directories, group=group)
        chunk = Chunk(PROMPTS[0], 0, range(10))
        pairs = ForwardBatch([chunk], BLOCK_SIZE)
        state = head.begin(pairs, torch.empty(0, 0), head.new_kv_cache(10 * BLOCK_SIZE), 1)
        return head.logits(state, 0)

    alone = logits(TensorParallelGroup())
    shares = run_ranks(size, logits)
    assert all(each.shape[1] < alone.shape[1] for each in shares)
    torch.testing.assert_close(torch.cat(shares, 1), alone, atol=1e-4, rtol=1e-4)


def test_tokens_of_the_target_alone_are_no_fault(directories):
    """Ids above those of the draft model stand for its last one, in prompts and on a device."""
    target, draft = directories
    speculation = SpeculativeConfig.of("colocated_draft_model", 3, model=str(draft))
    asked = [request("a", [370, 382, 5], max_tokens=12), request("b", [375], max_tokens=12)]
    expected = tokens_by(local_engine(target, engine_config(0), kernels="torch"), asked)
    for kernels in KERNELS:
        config = engine_config(speculation=speculation)
        engine = local_engine(target, config, kernels=kernels, head=HeadFiles(draft, method=METHOD))
        assert tokens_by(engine, asked) == expected


def test_a_list_of_tokens_and_a_window_cut_the_draft_model(directories, tmp_path):
    target, draft = ModelConfig.from_directory(directories[0]), directories[1]
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([5, 9, 17]))
    found = HeadConfig.from_directory(draft, target, 8, str(path), METHOD)
    assert found.shape.output_tokens == (5, 9, 17)
    assert set(found.shape.decoder.sliding_windows) == {8}
    decoder = load_model(
        directories[0],
        target,
        TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        kernels="torch",
    )
    assert {each for own in drafted(load_head(found, decoder)) for each in own} <= {5, 9, 17}


def test_memory_counts_the_model_once_and_no_features(directories):
    target, draft = (ModelConfig.from_directory(each) for each in directories)
    found = HeadConfig.from_directory(directories[1], target, method=METHOD)
    assert found.describe()[0].startswith("taken for a draft model: LlamaForCausalLM, 3 layers")
    assert found.weight_bytes("float32") == draft.weight_bytes("float32")
    assert found.kv_bytes_per_token("float32") == draft.kv_bytes_per_token("float32")
    assert (found.slot_size("cpu"), found.slot_size("cuda")) == (0, 0)
    assert found.max_loaded_versions == 1


def test_layers_for_multi_token_prediction_beside_it_do_not_matter(directories, tmp_path):
    shutil.copytree(directories[1], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(96, 192)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    target = ModelConfig.from_directory(directories[0])
    assert HeadConfig.from_directory(tmp_path, target, method=METHOD).method == METHOD


def test_a_model_that_needs_a_worker_is_refused(directories):
    small = ModelConfig.from_directory(directories[1])
    with pytest.raises(UnsupportedModelError, match=r"383 tokens, the target's 360; use method"):
        HeadConfig.from_directory(directories[0], small, method=METHOD)
