"""A head method that is added by three files, as docs/methods.md has it: entry, format, network.

`tests.specdec.bigram` has the files. The tests add the entry to the table of methods, and nothing
else: whatever does not follow from it fails.
"""

import ast
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import specdec
from specdec import LLM, SamplingParams
from specdec.config.speculation import methods
from specdec.config.speculation.methods import head_methods
from specdec.config.speculative_keys import read_speculation
from specdec.engine.models.model_report import Fit, Precision, report_model
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import head_method_of, method_of
from specdec.types.errors import InvalidValueError, SpecdecError, UnsupportedModelError
from tests.specdec.bigram.entry import BigramConfig
from tests.specdec.engines import engine_config, local_engine, tokens_by
from tests.specdec.llm.models import arguments, metrics_of
from tests.specdec.models.heads.driver import save
from tests.specdec.worker.device.head.test_head import requests, run_target
from tests.specdec.worker.device.runners import FakeGraphs, recorded_device_steps
from tools import wire_methods

NAME = BigramConfig.name
PROMPTS = ["The river", "Every spring"]
OWN_FILES = ("config/speculation/head_methods.py", "models/heads/formats/", "training/drafters/")
"""Where names of methods may stand: the entries, and values in published files."""
OTHER_THINGS = {
    ("config/model_aliases.py", "eagle3"): "a head that comes with the package",
    ("config/model_aliases.py", "colocated_draft_model"): "as above",
    ("models/config/stored_weights.py", "mtp"): "a part of the names of tensors",
    ("training/data/config.py", "dspark"): "a loss",
    ("training/losses.py", "dspark"): "a loss",
}


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    """Add the entry to the table of methods; there is nothing else to do."""
    monkeypatch.setitem(methods._TABLE, NAME, BigramConfig)


def bigram_dir(directory, target_dir, texts):
    """Write a head with the pairs of texts."""
    size = ModelConfig.from_directory(target_dir).vocab_size
    scores = torch.zeros(size, size)
    for text in texts:
        for token, following in pairwise(text):
            scores[following, token] += 1
    return save(directory, {"bigram_depth": 4}, {"scores.weight": scores})


def generate(target_dir, speculation, temperature):
    """Return the tokens of each prompt with those that follow, and the metrics."""
    keys = speculation and {"policy": "threshold", "num_speculative_tokens": 3, **speculation}
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1, ignore_eos=True)
    with LLM(**arguments(target_dir, speculative_config=keys, kernels="auto")) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = metrics_of(llm)
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs], metrics


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "keys",
    [{}, {"method": NAME}, {"method": "BIGRAM", "num_draft_tree_tokens": 6}],
    ids=["detected", "named", "trees"],
)
def test_it_drafts_and_is_lossless(tiny_model_dir, tmp_path, temperature, keys):
    expected, _ = generate(tiny_model_dir, None, temperature)
    head = str(bigram_dir(tmp_path, tiny_model_dir, expected))
    found, metrics = generate(tiny_model_dir, {**keys, "model": head}, temperature)
    assert found == expected
    assert metrics["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("graphs", [None, FakeGraphs()], ids=["operators", "graphs"])
def test_it_drafts_in_steps_on_the_device(tiny_model_dir, tmp_path, monkeypatch, graphs):
    plain = local_engine(tiny_model_dir, engine_config(0), kernels="torch")
    expected = tokens_by(plain, requests())
    texts = [[*each.prompt, *expected[each.request_id]] for each in requests()]
    on_device = recorded_device_steps(monkeypatch)
    head = bigram_dir(tmp_path, tiny_model_dir, texts)
    found, _, engine = run_target(tiny_model_dir, head, NAME, graphs=graphs)
    assert found == expected
    assert len(on_device) == engine.stats().counts.num_steps
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


def test_its_files_are_detected_and_reported(tiny_model_dir, tmp_path):
    head = bigram_dir(tmp_path, tiny_model_dir, ())
    assert method_of(head) == head_method_of(head) == NAME
    with pytest.raises(UnsupportedModelError, match=r"hydra_num_heads.* bigram_depth.*, bigram$"):
        method_of(save(tmp_path / "other", {}, {"vision.weight": torch.zeros(2, 2)}))
    report = report_model(tiny_model_dir, Precision("float32", None, is_native=False), 1)
    assert report.methods[-1].method == NAME
    assert report.methods[-1].fit is Fit.NEEDS_FILES


def test_its_keys_are_those_of_a_head():
    config = read_speculation({"method": "BIGRAM", "model": "head", "quantization": "int8"})
    assert config.drafter == BigramConfig("head", "int8")
    for keys in ({"method": NAME}, {"method": NAME, "model": "head", "draft_window": 8}):
        with pytest.raises(InvalidValueError):
            read_speculation(keys)
    with pytest.raises(SpecdecError, match=r"colocated_draft_model, bigram"):
        read_speculation({"method": "trigram"})


def test_the_protos_get_a_value_for_it():
    assert wire_methods.changed(wire_methods.PROTO.read_text()).count("_BIGRAM = 15;\n}") == 1


def test_no_other_module_names_a_head_method():
    root, known = Path(specdec.__file__).parent, head_methods().keys()
    for path in [*root.rglob("*.py"), *(root.parent / "cluster").rglob("*.py")]:
        name = str(path.relative_to(root if root in path.parents else root.parent))
        if name.startswith(OWN_FILES):
            continue
        text = path.read_text()
        if not any(method in text for method in known):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value in known:
                assert (name, node.value) in OTHER_THINGS, f"{path}:{node.lineno}"
