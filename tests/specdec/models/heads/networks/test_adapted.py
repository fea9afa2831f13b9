"""Rows of heads with adapters: which are changed, and that no other row changes their bits."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.medusa import MedusaHeads
from specdec.models.loading import load_model
from specdec.models.lora.peft import AdapterFiles
from specdec.worker.head.adapters import HeadAdapters
from tests.specdec.adapters import HEAD_MODULES, adapter_dir
from tests.specdec.heads import HEADS

BASE, FIRST, SECOND, EMPTY = range(4)
"""Ids: no adapter, two that update all layers, and one of the target alone."""

KERNELS = ["torch"] + ["native"] * (native_library() is not None)
BLOCK_SIZE, NUM_DRAFTS = 16, 3


class AdaptedHead:
    """A head with adapters, and one token of random sequences that it drafts after."""

    def __init__(self, method, target_dir, root, kernels, dtype=torch.float32):
        self.root = root
        head_dir = HEADS[method](target_dir, root / "head", [list(range(3, 20))])
        directory = head_dir if method == "mtp" else target_dir
        target = ModelConfig.from_directory(directory)
        self.config = HeadConfig.from_directory(head_dir, target, method=method)
        self.model = load_model(
            directory,
            target,
            TensorParallelGroup(),
            dtype=dtype,
            max_model_len=64,
            block_size=BLOCK_SIZE,
            kernels=kernels,
        )
        self.head = load_head(self.config, self.model)
        self.adapters = HeadAdapters(dtype)
        self.adapters.serve(self.head, self.config)
        layers = [2] if method == "mtp" else None
        for adapter_id in (FIRST, SECOND):
            path, rank = root / str(adapter_id), 4 * adapter_id
            options = {"modules": HEAD_MODULES, "layers": layers, "rank": rank}
            adapter = adapter_dir(path, head_dir, seed=adapter_id, **options)
            self.adapters.load(adapter_id, AdapterFiles.read(adapter))
        self.adapters.load(EMPTY, None)

    @torch.inference_mode()
    def logits(self, rows):
        """Return [B, NUM_DRAFTS, vocab_size] after sequences. rows: numbers and adapter ids."""
        head, size = self.head, self.config.target.hidden_size
        chunks = [
            Chunk([20 + number], 1, [place], adapter_id=adapter_id)
            for place, (number, adapter_id) in enumerate(rows)
        ]
        pairs = ForwardBatch(chunks, BLOCK_SIZE)
        shape = (len(head.taps), size) if head.taps else (size,)
        states = torch.stack(
            [
                torch.randn(shape, generator=torch.Generator().manual_seed(number))
                for number, _ in rows
            ]
        )
        cache = head.new_kv_cache(len(rows) * BLOCK_SIZE)
        features = head.features(states, pairs.adapter_runs)
        state, found = head.begin(pairs, features, cache, NUM_DRAFTS), []
        for index in range(NUM_DRAFTS):
            found.append(head.logits(state, index))
            if index < NUM_DRAFTS - 1:
                tokens = [30 + number + index for number, _ in rows]
                state = head.advance(state, tokens, index)
        return torch.stack(found, 1)


@pytest.fixture(params=list(HEADS))
def new_head(request, tiny_model_dir, tmp_path):
    return lambda *how: AdaptedHead(request.param, tiny_model_dir, tmp_path, *how)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_without_an_adapter_of_the_head_have_the_same_bits(new_head, kernels, monkeypatch):
    head = new_head(kernels)
    plain = head.logits([(number, BASE) for number in range(7)])
    beside = head.logits([(number, FIRST * (number % 2)) for number in range(7)])
    assert beside[::2].equal(plain[::2]), "rows beside those with an adapter"
    if kernels == "native":
        monkeypatch.setattr(MedusaHeads, "begin", lambda *_: pytest.fail("rows run on torch"))
    own = head.logits([(number, EMPTY * (number % 2)) for number in range(7)])
    assert own.equal(plain)


@pytest.mark.skipif(native_library() is None, reason="needs native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(new_head, dtype):
    head = new_head("native", dtype)
    ids = [BASE, FIRST, FIRST, SECOND, EMPTY, BASE, *[FIRST] * 40, SECOND]
    rows = list(enumerate(ids))
    together = head.logits(rows)
    for place in (0, 1, 2, 3, 4, 5, 20, 46):
        assert head.logits([rows[place]])[0].equal(together[place]), ids[place]
    changed = [not head.logits([(number, BASE)])[0].equal(together[number]) for number in range(6)]
    assert changed == [False, True, True, True, False, False]


def test_the_layers_with_adapters_are_known_before_ranks_load_them(new_head):
    head = new_head("torch")
    [version] = head.adapters._versions.values()
    count = sum(len(linear.projections) for linear in version.store.linears)
    layers = head.config.adapted_layers()
    assert len(layers) == count
    files = AdapterFiles.read(head.root / str(FIRST))
    files.require_modules(layers, "draft head's layers")
    assert head.config.method == "mtp" or layers.keys() == files.ranks.keys()


def test_an_adapter_has_the_names_of_the_version_that_it_was_made_for(tiny_model_dir, tmp_path):
    head = AdaptedHead("eagle3", tiny_model_dir, tmp_path, "torch")
    renamed = shutil.copytree(head.config.directory, tmp_path / "renamed")
    tensors = load_file(renamed / "model.safetensors")
    names = {name: re.sub(r"^midlayer\.", "layers.0.", name) for name in tensors}
    assert names.keys() != set(names.values())
    save_file({names[name]: each for name, each in tensors.items()}, renamed / "model.safetensors")
    config = HeadConfig.from_directory(renamed, head.config.target)
    version = load_head(config, head.model)
    head.adapters.serve(version, config)
    adapter = adapter_dir(tmp_path / "made", renamed, modules=HEAD_MODULES)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["head_sha256"] = config.fingerprint()
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    head.adapters.load(9, AdapterFiles.read(adapter))
    changed = head.adapters._adapters[9].updates  # by the projections of a layer
    assert sum(map(len, changed)) == len(config.adapted_layers())
