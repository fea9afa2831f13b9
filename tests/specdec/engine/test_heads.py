"""The real engine with draft heads on the target's ranks: when they draft, and that it is safe.

`test_methods.py` runs them through chunks, preemptions, prefix hits and several ranks.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.cpu import native_library
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker import HeadFiles
from tests.combinations import every_value
from tests.specdec.engines import (
    HashTarget,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import HEADS

K = 3
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
SAMPLED = {"temperature": 0.8, "max_tokens": 24}


def prompt(index):
    return [(29 * index + 31 * place) % 380 + 3 for place in range(9 + 2 * index)]


def requests(count=4, **params):
    values = {**SAMPLED, **params}
    return [request(f"r{i}", prompt(i), seed=i, **values) for i in range(count)]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation, for parameters of the requests."""
    return lambda **params: tokens_by(
        local_engine(tiny_model_dir, engine_config(0)), requests(**params)
    )


@pytest.fixture(scope="module")
def head_dirs(tiny_model_dir, tmp_path_factory, expected):
    outputs = [*expected().values(), *expected(temperature=0.0).values()]
    texts = [[*prompt(i % 4), *output] for i, output in enumerate(outputs)]
    return {
        name: write(tiny_model_dir, tmp_path_factory.mktemp(name), texts)
        for name, write in HEADS.items()
    }


def engine_with(directory, head_dir, method="medusa", control=None, kernels="auto", **changes):
    speculation = SpeculativeConfig.of(
        method, K, model=str(head_dir), **changes.pop("speculation", {})
    )
    control = control or SpeculationControl("on", 32, K)
    policy = SpeculationPolicy(control, clock=lambda: 0.0)
    config = engine_config(speculation=speculation, **changes)
    head = HeadFiles(head_dir, method=method)
    return local_engine(directory, config, policy=policy, head=head, kernels=kernels)


def head_of(engine):
    return engine._steps.target._runner.head.head


@pytest.mark.parametrize(("method", "kernels"), every_value(list(HEADS), KERNELS))
def test_kernels_and_lengths_change_no_token(tiny_model_dir, head_dirs, expected, method, kernels):
    engine = engine_with(tiny_model_dir, head_dirs[method], method, kernels=kernels)
    counts = [None, 1, 5, 2]
    asked = [
        request(f"r{i}", prompt(i), seed=i, speculation=SpeculationOptions(None, k), **SAMPLED)
        for i, k in enumerate(counts)
    ]
    assert tokens_by(engine, asked) == expected()
    speculation = engine.stats().counts.speculation
    assert speculation.mean_acceptance_length > 1.3, "the heads were fitted to these texts"
    assert len(engine.stats().counts.accepted_by_position) == 5


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": {40: 3.0}, "min_tokens": 10, "ignore_eos": False},
        {"top_k": 8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_drafts_are_shaped_and_change_no_token(tiny_model_dir, head_dirs, expected, params):
    engine = engine_with(tiny_model_dir, head_dirs["medusa"])
    assert tokens_by(engine, requests(**params)) == expected(**params)
    assert engine.stats().counts.speculation.num_draft_tokens > 0


def test_a_grammar_cuts_drafts_and_changes_no_token(tiny_model_dir, head_dirs):
    compiler = grammar_compiler(tiny_model_dir)
    spec = StructuredOutput(regex="(the|a) (river|bridge) is [a-z]{2,8} and [0-9]{1,3}")
    asked = [
        replace(each, grammar=compiler.compile(spec))
        for each in requests(structured_output=spec, max_tokens=40, ignore_eos=False)
    ]
    plain = tokens_by(local_engine(tiny_model_dir, engine_config(0)), asked)
    engine = engine_with(tiny_model_dir, head_dirs["medusa"])
    assert tokens_by(engine, asked) == plain
    assert engine.stats().counts.speculation.num_draft_tokens > 0


def test_nothing_is_drafted_for_a_request_that_opts_out(tiny_model_dir, head_dirs, expected):
    engine = engine_with(tiny_model_dir, head_dirs["medusa"])
    asked = requests(speculation=SpeculationOptions(enabled=False))
    head_of(engine).begin = None  # a call would fail
    assert tokens_by(engine, asked) == expected()
    assert engine.stats().counts.speculation.num_drafts == 0


def test_the_head_does_not_run_while_speculation_is_off(tiny_model_dir, head_dirs, expected):
    off, on = (SpeculationControl(mode, 32, K) for mode in ("off", "on"))
    engine = engine_with(tiny_model_dir, head_dirs["medusa"], control=off)
    head = head_of(engine)
    begin, head.begin = head.begin, None
    generated = {each.request_id: [] for each in requests()}
    for each in requests():
        engine.add(each)
    for step in range(1000):
        if step == 8:
            head.begin = begin
            engine.set_speculation(on)
        if not engine.has_work:
            break
        for output in engine.step():
            generated[output.request_id].extend(output.token_ids)
    assert generated == expected()
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


def test_a_request_may_choose_a_lookup_beside_the_head(tiny_model_dir, head_dirs, expected):
    lookups = {"first": "ngram", "prompt_lookup_min": 1}
    engine = engine_with(tiny_model_dir, head_dirs["medusa"], speculation=lookups)
    head_of(engine).begin = None
    asked = requests(speculation=SpeculationOptions(method="ngram"))
    assert tokens_by(engine, asked) == expected()
    assert set(engine.stats().counts.drafted_by_method) <= {"ngram"}


@pytest.mark.parametrize("poisoned", ["all", "second"])
def test_a_head_with_nan_logits_drafts_nothing_from_there(
    tiny_model_dir, head_dirs, expected, tmp_path, poisoned
):
    tensors = load_file(head_dirs["medusa"] / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("lm_heads") and (poisoned == "all" or ".1." in name):
            tensor[7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((head_dirs["medusa"] / "config.json").read_text())
    engine = engine_with(tiny_model_dir, tmp_path)
    assert tokens_by(engine, requests()) == expected()
    counts = engine.stats().counts
    longest = 0 if poisoned == "all" else 1
    assert counts.speculation.num_draft_tokens == longest * counts.speculation.num_drafts
    assert (counts.speculation.num_drafts > 0) == bool(longest)


def test_a_truncated_draft_vocabulary_is_drafted_with_the_targets_noise(
    tiny_model_dir, head_dirs, expected, tmp_path
):
    """The tokens of the texts are in it, so that its drafts are those of the whole vocabulary."""
    used = sorted({token for tokens in expected().values() for token in tokens})
    kept = torch.tensor(used + [token for token in range(0, 383, 5) if token not in used])
    tensors = load_file(head_dirs["medusa"] / "model.safetensors")
    for name in [each for each in tensors if each.startswith("lm_heads")]:
        tensors[name] = tensors[name][kept].contiguous()
    save_file({**tensors, "token_map": kept}, tmp_path / "model.safetensors")
    config = json.loads((head_dirs["medusa"] / "config.json").read_text())
    config["truncated_vocab_size"] = len(kept)
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = engine_with(tiny_model_dir, tmp_path)
    assert tokens_by(engine, requests()) == expected()
    assert engine.stats().counts.speculation.mean_acceptance_length > 1.3


class TestMessages:
    """Rows for a target without a model, which returns no drafts."""

    def steps(self, method="medusa", **changes):
        speculation = SpeculativeConfig.of(method, K, model="head")
        config = engine_config(speculation=speculation, **changes)
        return config, HashTarget(config.block_size, 383)

    def test_every_row_names_the_draft_length_of_the_next_step(self, tiny_model_dir):
        config, target = self.steps(max_num_batched_tokens=8)
        engine = make_engine(tiny_model_dir, config, target)
        run(engine, [request("r", prompt(4), max_tokens=8)])
        rows = [step.rows[0] for step in target.steps]
        assert [row.samples for row in rows[:3]] == [False, False, True]
        # After the row that yields token n, tokens n + 1 to 7 may be drafted, the 8th never.
        assert [row.drafting.num_next for row in rows] == [3, 3, 3, 3, 3, 3, 2, 1, 0, 0]

    def test_no_block_is_taken_for_the_drafts_of_a_head_without_kv(self, tiny_model_dir):
        config, target = self.steps(num_blocks=40)
        engine = make_engine(tiny_model_dir, config, target)
        engine.add(request("r", [5] * 12, max_tokens=8))
        engine.step()
        assert engine.stats().num_free_blocks == 40 - 3
