"""A draft model as the fallback of a head: each sequence is drafted for by the one that can."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import make_proposer
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles
from tests.specdec.engines import draft_model, engine_config, local_engine, request, tokens_by
from tests.specdec.heads import HEADS
from tests.specdec.llm.models import arguments, metrics_of

K = 3
METHODS = ("medusa", "eagle3")
OFF, ON = (SpeculationControl(mode, 32, K) for mode in ("off", "on"))


def prompt(index):
    return [(29 * index + 31 * place) % 380 + 3 for place in range(9 + 2 * index)]


def requests(**params):
    values = {"temperature": 0.8, "max_tokens": 24, **params}
    return [request(f"r{i}", prompt(i), seed=i, **values) for i in range(4)]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0)), requests())


@pytest.fixture(scope="module")
def head_dirs(tiny_model_dir, tmp_path_factory, expected):
    texts = [[*prompt(i), *expected[f"r{i}"]] for i in range(4)]
    return {
        name: HEADS[name](tiny_model_dir, tmp_path_factory.mktemp(name), texts) for name in METHODS
    }


def engine_with(directory, head_dir, method, control=ON, **changes):
    fallback = {"method": "draft_model"}
    speculation = SpeculativeConfig.of(method, K, model=str(head_dir), fallback=fallback)
    return local_engine(
        directory,
        engine_config(speculation=speculation, **changes),
        proposer=make_proposer(speculation, draft_model(directory)),
        policy=SpeculationPolicy(control, clock=lambda: 0.0),
        head=HeadFiles(head_dir),
    )


def run_with_controls(engine, controls, asked):
    """Run requests, with other settings from some steps on; return the tokens of each."""
    tokens = {each.request_id: [] for each in asked}
    for each in asked:
        engine.add(each)
    for step in range(1000):
        if step in controls:
            engine.set_speculation(controls[step])
        if not engine.has_work:
            return tokens
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    raise AssertionError("the engine did not end")


@pytest.mark.parametrize("method", METHODS)
def test_the_draft_model_drafts_where_the_head_has_nothing(
    tiny_model_dir, head_dirs, expected, method
):
    """The first step after speculation was off; small chunks lengthen a KV head's catch-up."""
    engine = engine_with(tiny_model_dir, head_dirs[method], method, OFF, max_num_batched_tokens=8)
    controls = {10: ON, 13: OFF, 15: ON}
    assert run_with_controls(engine, controls, requests()) == expected
    counts = engine.stats().counts
    assert set(counts.drafted_by_method) == {method, "draft_model"}
    assert sum(counts.accepted_by_method["draft_model"]) > 0
    assert sum(counts.accepted_by_method[method]) > 0
    engine.check_integrity()


def test_the_head_drafts_alone_where_it_can(tiny_model_dir, head_dirs, expected):
    engine = engine_with(tiny_model_dir, head_dirs["medusa"], "medusa")
    assert run_with_controls(engine, {}, requests()) == expected
    drafted = engine.stats().counts.drafted_by_method
    assert drafted["medusa"][0] > 10 * sum(drafted.get("draft_model", (0,)))


def test_a_head_with_nan_logits_leaves_all_to_the_draft_model(
    tiny_model_dir, head_dirs, expected, tmp_path
):
    shutil.copy(head_dirs["medusa"] / "config.json", tmp_path)
    tensors = load_file(head_dirs["medusa"] / "model.safetensors")
    broken = {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}
    save_file(broken, tmp_path / "model.safetensors")
    engine = engine_with(tiny_model_dir, tmp_path, "medusa")
    assert run_with_controls(engine, {}, requests()) == expected
    counts = engine.stats().counts
    assert set(counts.drafted_by_method) == {"draft_model"}
    assert counts.speculation.mean_acceptance_length > 2, "the target drafts for itself"


def test_a_request_may_choose_either(tiny_model_dir, head_dirs, expected):
    for method in ("eagle3", "draft_model"):
        engine = engine_with(tiny_model_dir, head_dirs["eagle3"], "eagle3")
        asked = requests(speculation=SpeculationOptions(method=method))
        assert run_with_controls(engine, {}, asked) == expected
        assert set(engine.stats().counts.drafted_by_method) == {method}


def test_preemption_changes_no_token(tiny_model_dir, head_dirs, expected):
    engine = engine_with(
        tiny_model_dir, head_dirs["eagle3"], "eagle3", max_model_len=60, num_blocks=22
    )
    assert run_with_controls(engine, {4: OFF, 7: ON}, requests()) == expected
    assert engine.stats().counts.num_preemptions > 0


def test_an_llm_with_head_and_draft_model(tiny_model_dir, head_dirs):
    keys = {"method": "eagle3", "model": str(head_dirs["eagle3"])}
    fallback = {"method": "draft_model", "quantization": "int8"}
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.8)
    ]
    tokens = []
    # The policy goodput may draft nothing on a busy machine.
    for policy in (None, "goodput", "threshold"):
        speculation = policy and {**keys, "fallback": fallback, "policy": policy}
        with LLM(**arguments(tiny_model_dir, speculative_config=speculation)) as llm:
            outputs = llm.generate(["The river", "Every spring"], params, use_tqdm=False)
            tokens.append([each.outputs[0].token_ids for each in outputs])
            metrics = metrics_of(llm)
    assert tokens[0] == tokens[1] == tokens[2]
    assert metrics["spec_decode_num_draft_tokens"] > 0
