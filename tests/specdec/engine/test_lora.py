"""The real engine with LoRA adapters: batching, caching, speculation and ranks change no token."""

from dataclasses import replace
from functools import cache

import pytest

from specdec.config.engine import AdapterLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.kernels.cpu import native_library
from specdec.sequences import sequence
from specdec.sequences.block_manager import root_key
from specdec.types.errors import LostAdapterError, UnknownModelError
from specdec.worker import HeadFiles, LocalTarget, RankModel, load_target
from tests.combinations import every_value
from tests.specdec.adapters import ATTENTION, adapter_dir, merged_dir, rewrite
from tests.specdec.attention_heads import fitted_head_dir
from tests.specdec.engines import (
    Transcript,
    draft_model,
    engine_config,
    load_adapter,
    local_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.tiny import disturbed_llama_dir

KERNELS = ["torch"] + ["native"] * (native_library() is not None)
LIMITS = AdapterLimits(max_loras=8, max_rank=16, max_loaded=8)
NUM_ADAPTERS = 8


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    variants = [{}, {"rank": 8, "modules": ATTENTION}, {"rank": 1}, {"rank": 16, "layers": [1]}]
    return {
        f"a{index}": adapter_dir(
            root / f"a{index}", tiny_model_dir, seed=index, **variants[index % len(variants)]
        )
        for index in range(NUM_ADAPTERS)
    }


def prompts():
    """Return repetitive prompts, so that lookups find matches; some exceed a prefill chunk."""
    return [[(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * (i % 7)) for i in range(9)]


def names():
    return ["", *(f"a{index}" for index in range(NUM_ADAPTERS))]


def requests(engine, temperature=0.0, **params):
    """Return a request for the model itself and for each adapter."""
    plain = (
        request(name or "base", prompt, seed=index, temperature=temperature, **params)
        for index, (name, prompt) in enumerate(zip(names(), prompts(), strict=True))
    )
    return [with_adapter(engine, *each) for each in zip(plain, names(), strict=True)]


def config(num_draft_tokens=0, **changes):
    return engine_config(num_draft_tokens, **{"max_num_seqs": 9, "adapters": LIMITS, **changes})


@pytest.fixture(scope="module")
def merged_tokens(tiny_model_dir, adapters, tmp_path_factory):
    """Return the greedy tokens of each request on the model with its adapter merged."""
    root, found = tmp_path_factory.mktemp("merged"), {}
    for name, prompt in zip(names(), prompts(), strict=True):
        directory = tiny_model_dir
        if name:
            directory = merged_dir(root / name, tiny_model_dir, adapters[name])
        engine = local_engine(directory, engine_config(0))
        found |= tokens_by(engine, [request(name or "base", prompt)])
    return found


@pytest.fixture(scope="module")
def reference(tiny_model_dir, adapters):
    """Return a function to the tokens of each request alone and without speculation."""

    @cache
    def generate(kernels, temperature):
        engine = local_engine(tiny_model_dir, config(), kernels=kernels, adapters=adapters)
        alone = (tokens_by(engine, [each]) for each in requests(engine, temperature))
        return {name: tokens for each in alone for name, tokens in each.items()}

    return generate


@pytest.mark.parametrize(
    ("kernels", "size"),
    [
        pytest.param(kernels, size, marks=() if size in quick else pytest.mark.slow)
        for kernels, quick in zip(KERNELS[::-1], ((1, 3), (2,)), strict=False)
        for size in (1, 2, 3)
    ],
)
def test_each_request_of_a_batch_has_the_tokens_of_its_adapter_merged(
    tiny_model_dir, adapters, merged_tokens, kernels, size
):
    def generate(group):
        engine = local_engine(tiny_model_dir, config(3), group, kernels=kernels, adapters=adapters)
        return tokens_by(engine, requests(engine))

    ranks = run_ranks(size, generate)
    assert all(rank == merged_tokens for rank in ranks)
    assert len({tuple(tokens) for tokens in merged_tokens.values()}) == NUM_ADAPTERS + 1


CACHED, PREEMPTED, UNCACHED = {}, {"num_blocks": 48}, {"enable_prefix_caching": False}
RUNS = {"preempted": (3, PREEMPTED), "uncached": (3, UNCACHED), "cached": (3, CACHED)}
WITHOUT_DRAFTS = {"preempted without drafts": (0, PREEMPTED)}


@pytest.mark.parametrize(
    ("num_draft_tokens", "changes", "kernels", "temperature"),
    every_value(RUNS, KERNELS[::-1], [0.8, 0.0], slow=WITHOUT_DRAFTS),
)
def test_ngram_drafts_and_preemption_change_no_token(
    tiny_model_dir, adapters, reference, num_draft_tokens, changes, kernels, temperature
):
    engine = local_engine(
        tiny_model_dir, config(num_draft_tokens, **changes), kernels=kernels, adapters=adapters
    )
    expected = reference(kernels, temperature)
    # A second run finds its prompts in the cache, under the adapters' keys.
    for _ in range(2 if changes is CACHED else 1):
        assert tokens_by(engine, requests(engine, temperature)) == expected
    counts = engine.stats().counts
    assert (counts.num_cached_tokens > 0) == (changes is CACHED)
    assert (counts.num_preemptions > 0) == (changes is PREEMPTED)
    assert (counts.speculation.num_accepted_tokens > 0) == (num_draft_tokens > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_a_draft_model_without_adapters_change_no_token(
    tiny_model_dir, adapters, reference, tmp_path, temperature
):
    draft_dir = disturbed_llama_dir(tiny_model_dir, tmp_path)
    speculation = SpeculativeConfig.of(method="draft_model", num_speculative_tokens=3)
    engine = local_engine(
        tiny_model_dir,
        config(speculation=speculation),
        proposer=draft_model(draft_dir),
        adapters=adapters,
    )
    found = tokens_by(engine, requests(engine, temperature))
    assert found == reference("auto", temperature)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_a_head_change_no_token(
    tiny_model_dir, adapters, reference, tmp_path, temperature
):
    """The head reads hidden states of the adapted model, in blocks of the adapter alone."""
    plain = local_engine(tiny_model_dir, engine_config(0))
    asked = [request(f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    outputs = tokens_by(plain, asked)
    texts = [[*each.prompt, *outputs[each.request_id]] for each in asked]
    head = fitted_head_dir(
        "eagle3", tiny_model_dir, tmp_path, texts, [len(each.prompt) for each in asked], depth=3
    )
    speculation = SpeculativeConfig.of(method="eagle3", model="head", num_speculative_tokens=3)
    engine = local_engine(
        tiny_model_dir,
        config(speculation=speculation),
        head=HeadFiles(head),
        adapters=adapters,
    )
    for _ in range(2):
        found = tokens_by(engine, requests(engine, temperature))
        assert found == reference("auto", temperature)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("quantization", ["int8", "w8a8"] if native_library() else ["int8"])
def test_a_quantized_target_generates_the_same_in_any_batch(tiny_model_dir, adapters, quantization):
    def engine_with(num_draft_tokens):
        return local_engine(
            tiny_model_dir,
            config(num_draft_tokens),
            quantization=quantization,
            adapters=adapters,
        )

    engine = engine_with(0)
    alone = {}
    for each in requests(engine, 0.7):
        alone |= tokens_by(engine, [each])
    engine = engine_with(3)
    assert tokens_by(engine, requests(engine, 0.7)) == alone


def same_prompt(engine, order):
    prompt = [7, 8, 9, 10] * 8
    return [with_adapter(engine, request(name or "base", prompt), name) for name in order]


def test_no_kv_is_shared_between_adapters(tiny_model_dir, adapters, monkeypatch):
    """Requests with the same prompt, one after the other; the last part is the test's own test."""

    def generate(order):
        engine = local_engine(tiny_model_dir, config(), adapters=adapters)
        found = {}
        for each in same_prompt(engine, order):
            found |= tokens_by(engine, [each])
        return found, engine.stats().counts.num_cached_tokens

    alone = {name: generate([name])[0][name or "base"] for name in ("", "a0", "a1")}
    found, num_cached = generate(["", "a0", "a1"])
    assert found == {name or "base": tokens for name, tokens in alone.items()}
    assert num_cached == 0
    assert generate(["a0", "a0"])[1] == 28

    monkeypatch.setattr(sequence, "root_key", lambda salt, _: root_key(salt))
    found, num_cached = generate(["", "a0", "a1"])
    assert num_cached == 56
    assert found["a0"] != alone["a0"]


def test_a_reloaded_name_shares_no_kv_with_the_adapter_before(tiny_model_dir, adapters):
    engine = local_engine(tiny_model_dir, config(), adapters={"a": adapters["a0"]})
    (first,) = same_prompt(engine, ["a"])
    before = tokens_by(engine, [first])["a"]
    engine.adapters.unload("a")
    engine.advance_adapters()
    load_adapter(engine, "a", adapters["a1"])
    (second,) = same_prompt(engine, ["a"])
    after = tokens_by(engine, [second])["a"]
    assert engine.stats().counts.num_cached_tokens == 0
    other = local_engine(tiny_model_dir, config(), adapters={"a": adapters["a1"]})
    assert after == tokens_by(other, same_prompt(other, ["a"]))["a"] != before


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_adapters_come_and_go_under_traffic(tiny_model_dir, adapters, reference, num_draft_tokens):
    """At each step one adapter is loaded, replaced or unloaded, also those in use."""
    engine = local_engine(
        tiny_model_dir,
        config(num_draft_tokens, adapters=AdapterLimits(8, 16, 30)),
        adapters=adapters,
    )
    asked = requests(engine)
    transcripts = {each.request_id: Transcript() for each in asked}
    for each in asked:
        engine.add(each)
    num_steps = 0
    while engine.has_work:
        for output in engine.step():
            transcripts[output.request_id].add(output)
        engine.check_integrity()
        name = f"a{num_steps % NUM_ADAPTERS}"
        if num_steps < NUM_ADAPTERS:
            engine.adapters.unload(name)
        elif num_steps < 2 * NUM_ADAPTERS:
            load_adapter(engine, name, adapters[f"a{7 - num_steps % NUM_ADAPTERS}"])
        elif num_steps < 3 * NUM_ADAPTERS:
            load_adapter(engine, name, adapters[name], replaces=True)
        num_steps += 1
    assert {name: each.token_ids for name, each in transcripts.items()} == reference("auto", 0.0)
    engine.advance_adapters()
    infos = engine.adapter_infos()
    assert [each.state for each in infos] == ["ready"] * len(infos)
    with pytest.raises(UnknownModelError):
        engine.add(replace(asked[1], model="gone"))
    again = tokens_by(engine, requests(engine))
    for name, tokens in again.items():
        if name == "base" or num_steps > 3 * NUM_ADAPTERS:
            assert tokens == reference("auto", 0.0)[name]


def test_an_adapter_in_use_is_freed_with_its_last_request(tiny_model_dir, adapters):
    engine = local_engine(tiny_model_dir, config(), adapters={"a0": adapters["a0"]})
    first, second = (
        with_adapter(engine, request(name, [5, 6, 7], max_tokens=count), "a0")
        for name, count in (("first", 4), ("second", 8))
    )
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.adapters.unload("a0")
    states = []
    while engine.has_work:
        engine.step()
        states += [(each.state, each.num_requests) for each in engine.adapter_infos()]
    assert ("unloading", 2) in states
    assert ("unloading", 1) in states
    assert engine.adapter_infos() == ()


def test_an_aborted_request_frees_its_adapter_without_a_step(tiny_model_dir, adapters):
    engine = local_engine(tiny_model_dir, config(), adapters={"a0": adapters["a0"]})
    engine.add(with_adapter(engine, request("r", [5, 6, 7]), "a0"))
    engine.step()
    engine.adapters.unload("a0")
    engine.abort("r")
    assert engine.adapter_infos() == ()


def new_target(directory):
    return LocalTarget(
        load_target(RankModel(directory, "float32", config()), run_ranks(1, lambda g: g)[0])
    )


def test_a_restarted_target_loads_the_adapters_again(tiny_model_dir, adapters, reference):
    engine = local_engine(tiny_model_dir, config(), adapters=adapters)
    transcripts = {each.request_id: Transcript() for each in requests(engine)}
    for each in requests(engine):
        engine.add(each)
    for _ in range(5):
        for output in engine.step():
            transcripts[output.request_id].add(output)
    engine.adapters.unload("a3")
    engine.replace_target(new_target(tiny_model_dir))
    assert engine.is_stalled
    while engine.has_work:
        for output in engine.step():
            transcripts[output.request_id].add(output)
    assert {name: each.token_ids for name, each in transcripts.items()} == reference("auto", 0.0)
    assert [each.name for each in engine.adapter_infos()] == [f"a{i}" for i in range(8) if i != 3]


def test_requests_of_an_adapter_that_is_gone_after_a_restart_fail(
    tiny_model_dir, adapters, tmp_path
):
    directory = adapter_dir(tmp_path / "a", tiny_model_dir)
    engine = local_engine(tiny_model_dir, config(), adapters={"a": directory, "b": adapters["a1"]})
    asked = [with_adapter(engine, request(name, [5, 6, 7]), name) for name in ("a", "b")]
    transcripts = {each.request_id: Transcript() for each in asked}
    for each in asked:
        engine.add(each)
    engine.step()
    rewrite(directory, peft_type="OTHER")
    engine.replace_target(new_target(tiny_model_dir))
    while engine.has_work:
        for output in engine.step():
            transcripts[output.request_id].add(output)
    assert isinstance(transcripts["a"].error, LostAdapterError)
    assert len(transcripts["b"].token_ids) == 24
    assert list(engine.adapters.ids) == ["b"]


def test_a_request_whose_adapter_an_order_finds_gone_ends(tiny_model_dir, tmp_path):
    """An order polls the ranks between the restart and the next step."""
    directory = adapter_dir(tmp_path / "a", tiny_model_dir)
    engine = local_engine(tiny_model_dir, config(), adapters={"a": directory})
    engine.add(with_adapter(engine, request("r", [5, 6, 7]), "a"))
    engine.step()
    rewrite(directory, peft_type="OTHER")
    engine.replace_target(new_target(tiny_model_dir))
    control = AdapterControl(engine, engine.adapters, LIMITS, "tiny")
    while not engine.adapters.is_settled:
        control._fault_of(1)
    assert engine.has_work
    (output,) = engine.step()
    assert (output.request_id, type(output.error)) == ("r", LostAdapterError)
    assert not engine.has_work


def test_a_request_follows_its_adapters_name_to_the_replacement(tiny_model_dir, adapters):
    """It was encoded before the replacement, and reaches the engine after it."""
    engine = local_engine(tiny_model_dir, config(), adapters={"a": adapters["a0"]})
    (asked,) = same_prompt(engine, ["a"])
    load_adapter(engine, "a", adapters["a1"], replaces=True)
    found = tokens_by(engine, [asked])
    other = local_engine(tiny_model_dir, config(), adapters={"a": adapters["a1"]})
    assert found == tokens_by(other, same_prompt(other, ["a"]))
