# Modules: specdec.speculation.proposers.draft_adapters
"""Adapters of a draft model: they raise acceptance and change no token, alone and in a batch."""

from dataclasses import replace
from itertools import cycle
from unittest.mock import Mock

import numpy as np
import pytest

from specdec.config.engine import AdapterLimits
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.model_limits import draft_adapter_fault
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.block_manager import root_key
from specdec.speculation.proposers import draft_model as draft_model_module
from specdec.speculation.proposers.cross_vocab.vocab_adapter import EqualIds
from specdec.speculation.proposers.draft_adapters import DraftAdapters
from specdec.text.vocab_map import VocabularyMap
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.adapters import adapter_dir, varied_adapter_dirs
from tests.specdec.engines import (
    Transcript,
    draft_model,
    engine_config,
    load_adapter,
    local_engine,
    request,
    run,
    tokens_by,
    with_adapter,
)
from tests.specdec.tiny import disturbed_llama_dir, tiny_llama_dir

LIMITS = AdapterLimits(max_loras=4, max_rank=16, max_loaded=8)
NAMES = ["", "a", "b", "c"]


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    return varied_adapter_dirs(tmp_path_factory.mktemp("adapters"), tiny_model_dir)


@pytest.fixture(scope="module")
def similar_model_dir(tiny_model_dir, tmp_path_factory):
    return disturbed_llama_dir(tiny_model_dir, tmp_path_factory.mktemp("similar"), 0.05)


def drafting_engine(directory, adapters, drafts=None, draft_dir=None, mode="off", **draft_limits):
    """Return an engine with the model as its own draft model, or another one, and the drafter.

    drafts: adapters of the draft model; None for those of the target.
    """
    drafter = draft_model(draft_dir or directory, adapters=LIMITS, **draft_limits)
    drafter._ahead.planner.end_step = lambda **_: None  # plans do not depend on the machine
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting=mode)
    engine = local_engine(
        directory,
        engine_config(speculation=speculation, adapters=LIMITS),
        proposer=drafter,
        adapters=adapters,
        draft_adapters=adapters if drafts is None else drafts,
    )
    return engine, drafter


def requests(engine, temperature=0.0, names=NAMES):
    """Return a request for the model itself, and for adapters; some prompts need two chunks."""
    return [
        with_adapter(
            engine,
            request(
                name or "base",
                [(17 * i + 31 * j) % 380 + 3 for j in range(12 + 5 * i)],
                seed=i,
                temperature=temperature,
            ),
            name,
        )
        for i, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def reference(tiny_model_dir, adapters):
    """Return the tokens of each request alone, without speculation, by temperature."""
    engine = local_engine(tiny_model_dir, engine_config(adapters=LIMITS), adapters=adapters)
    return {
        temperature: {
            name: tokens
            for each in requests(engine, temperature)
            for name, tokens in tokens_by(engine, [each]).items()
        }
        for temperature in (0.0, 0.8)
    }


def acceptance(engine):
    counts = engine.stats().counts
    return {name: each.acceptance_rate for name, each in counts.drafts_by_adapter.items()}


@pytest.mark.parametrize("mode", ["off", "continuing", "outcomes"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_targets_adapters_on_its_copy_draft_what_the_target_generates(
    tiny_model_dir, adapters, reference, temperature, mode
):
    engine, drafter = drafting_engine(tiny_model_dir, adapters, mode=mode)
    assert tokens_by(engine, requests(engine, temperature)) == reference[temperature]
    assert acceptance(engine) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert engine.stats().counts.speculation.acceptance_rate == 1.0
    assert mode == "off" or drafter.counts.ahead.hit_rate >= 0.9
    drafter.check_integrity()


def test_an_adapter_without_a_counterpart_is_drafted_for_by_the_base_model(
    tiny_model_dir, adapters, reference
):
    drafts = {"a": adapters["a"]}
    engine, _ = drafting_engine(tiny_model_dir, adapters, drafts)
    assert tokens_by(engine, requests(engine)) == reference[0.0]
    found = acceptance(engine)
    assert found["a"] == 1.0
    assert found["b"] < 0.8
    sources = {each.name: each.draft_source for each in engine.adapter_infos()}
    assert sources == {"a": str(adapters["a"]), "b": "", "c": ""}


def test_drafts_are_the_same_alone_and_in_a_batch(tiny_model_dir, adapters, similar_model_dir):
    """A draft model that errs, so that drafts show more than the target's tokens."""

    def drafted(batches):
        engine, drafter = drafting_engine(tiny_model_dir, adapters, draft_dir=similar_model_dir)
        found, take = {}, drafter.take

        def recorded(asked):
            proposals = take(asked)
            by_id = {each.seq.seq_id: each.seq.request.request_id for each in asked}
            for each in proposals:
                drafts = found.setdefault(by_id[each.seq_id], {})
                drafts[each.base_length] = each.draft_token_ids
            return proposals

        drafter.take = recorded
        for chosen in batches:
            run(engine, requests(engine)[chosen])
        return found, engine.stats().counts.speculation.acceptance_rate

    together, rate = drafted([slice(None)])
    alone, _ = drafted([slice(index, index + 1) for index in range(len(NAMES))])
    assert 0.1 < rate < 1
    assert together.keys() == alone.keys()
    for name, drafts in together.items():
        both = drafts.keys() & alone[name].keys()
        assert len(both) > 5
        assert all(drafts[length] == alone[name][length] for length in both)


def test_no_kv_of_the_draft_model_is_shared_between_its_adapters(
    tiny_model_dir, adapters, monkeypatch
):
    """Requests with the same prompt, one after the other; the last part is the test's own test."""

    def rates():
        engine, drafter = drafting_engine(tiny_model_dir, adapters)
        for name in NAMES:
            asked = request(name or "base", [7, 8, 9, 10] * 8)
            run(engine, [with_adapter(engine, asked, name)])
        return acceptance(engine), drafter.num_catch_up_tokens

    own, num_caught_up = rates()
    assert own == {"a": 1.0, "b": 1.0, "c": 1.0}
    monkeypatch.setattr(draft_model_module, "root_key", lambda salt, _: root_key(salt))
    shared, num_with_shared = rates()
    assert num_with_shared < num_caught_up
    assert min(shared.values()) < 1


def test_adapters_without_counterparts_share_the_kv_of_the_draft_model(tiny_model_dir, adapters):
    engine, drafter = drafting_engine(tiny_model_dir, adapters, {})
    counts = []
    for name in ("a", "b"):
        run(engine, [with_adapter(engine, request(name, [7, 8, 9, 10] * 8), name)])
        counts.append(drafter.num_catch_up_tokens)
    assert counts[0] > 0
    assert counts[1] == counts[0]


def test_draft_adapters_come_and_go_under_traffic(tiny_model_dir, adapters, reference):
    """At each step one is loaded, replaced or unloaded, with a counterpart and without."""
    engine, drafter = drafting_engine(tiny_model_dir, adapters, {})
    asked = requests(engine)
    transcripts = {each.request_id: Transcript() for each in asked}
    for each in asked:
        engine.add(each)
    orders = iter([(name, draft) for draft in (True, False, True) for name in ("a", "b", "c")])
    num_steps = 0
    while engine.has_work:
        for output in engine.step():
            transcripts[output.request_id].add(output)
        engine.check_integrity()
        num_steps += 1
        if engine.adapters.has_room and (order := next(orders, None)) is not None:
            name, has_draft = order
            draft = adapters[name] if has_draft else None
            load_adapter(engine, name, adapters[name], replaces=True, draft=draft)
    assert num_steps > 6
    assert {name: each.token_ids for name, each in transcripts.items()} == reference[0.0]
    for name in ("a", "b", "c"):
        load_adapter(engine, name, adapters[name], replaces=True, draft=adapters[name])
    engine.advance_adapters()  # which frees the replaced ones
    assert drafter._lora._loaded == set(engine.adapters.ids.values())
    again = tokens_by(engine, requests(engine))
    assert again == reference[0.0]


def test_a_counterpart_that_arrives_later_is_used_from_then_on(tiny_model_dir, adapters):
    """The draft model runs the text again with it: its KV is that of the base model."""
    engine, drafter = drafting_engine(tiny_model_dir, {"b": adapters["b"]}, {})
    engine.add(requests(engine, names=["b"])[0])
    while engine.stats().counts.speculation.num_drafts < 2:
        engine.step()
    before = acceptance(engine)["b"]
    adapter_id = engine.adapters.ids["b"]
    file = engine.adapters._adapters[adapter_id].file
    drafter.load_adapter(file)
    assert drafter.adapter_fault(adapter_id) == ""
    counts = engine.stats().counts.speculation
    while engine.has_work:
        engine.step()
        drafter.check_integrity()
    after = engine.stats().counts.speculation
    assert before < 1
    num_drafted = after.num_draft_tokens - counts.num_draft_tokens
    num_accepted = after.num_accepted_tokens - counts.num_accepted_tokens
    assert num_drafted >= 15
    assert num_drafted - num_accepted <= 3, "all but the draft that was in flight"


def control_of(engine, draft_fault=""):
    return AdapterControl(engine, engine.adapters, LIMITS, "tiny", draft_fault)


def test_a_counterpart_of_another_shape_is_refused_by_the_name_of_its_module(
    tiny_model_dir, adapters, tmp_path
):
    engine, drafter = drafting_engine(tiny_model_dir, {})
    other = tiny_llama_dir(tmp_path / "other", layers=1, hidden=96, heads=4)
    wrong = adapter_dir(tmp_path / "wrong", other)
    control = control_of(engine)
    text = r"adapter a cannot be loaded: draft model: .*model\.layers\.0\.\S+ is updated as \["
    with pytest.raises(UnsupportedModelError, match=text):
        control.load_all([AdapterOrder.load("a", str(adapters["a"]), draft_path=str(wrong))])
    assert engine.adapter_infos() == ()
    assert not drafter._lora._loaded
    control.load_all(
        [AdapterOrder.load("a", str(adapters["a"]), draft_path=str(adapters["a"]))] * 2
    )
    (info,) = engine.adapter_infos()
    assert (info.name, info.draft_source) == ("a", str(adapters["a"]))
    with pytest.raises(InvalidValueError, match="a name that no loaded adapter has"):
        control.load_all([AdapterOrder.load("a", str(adapters["a"]))])


@pytest.mark.parametrize(
    ("speculation", "draft", "reason"),
    [
        (None, None, "no draft model or head is configured"),
        (None, "varied", "the draft model takes no adapters"),
        ("medusa", None, "draft heads take adapters on a CPU alone"),
    ],
)
def test_a_counterpart_is_refused_without_a_drafter_for_it(
    tiny_model_dir, adapters, speculation, draft, reason
):
    engine = local_engine(tiny_model_dir, engine_config(adapters=LIMITS))
    path = str(adapters["a"])
    values = {"model": "m", "device": "cuda", "enable_lora": True}
    if speculation:
        values |= {"speculative_config": {"method": speculation, "model": "head"}}
    model = draft and replace(ModelConfig.from_directory(tiny_model_dir), varied=Mock())
    fault = draft_adapter_fault(LLMConfig.from_mapping(values), model)
    with pytest.raises(InvalidValueError, match=f"draft_path is .* must be left out: {reason}"):
        control_of(engine, fault).load_all([AdapterOrder.load("a", path, draft_path=path)])
    assert engine.adapter_infos() == ()


def test_a_draft_model_takes_the_counterparts_beside_a_head_on_a_gpu(tiny_model_dir):
    speculation = {"method": "medusa", "model": "head"}
    values = {"model": "m", "device": "cuda", "enable_lora": True}
    config = LLMConfig.from_mapping({**values, "speculative_config": speculation})
    assert not draft_adapter_fault(config, ModelConfig.from_directory(tiny_model_dir))


def test_no_draft_ahead_follows_a_text_that_a_load_has_kept_from_the_drafter(
    tiny_model_dir, adapters, reference, monkeypatch
):
    """Each third load ends between the two calls of a step, where the text is not known yet."""
    engine, drafter = drafting_engine(tiny_model_dir, adapters, mode="outcomes")
    same = np.arange(383, dtype=np.int32)
    drafter._adapter = drafter._ahead._adapter = EqualIds(VocabularyMap(same, same, True))
    is_loading = cycle((False, False, True, False))  # as `take` and `ahead` of two steps read it
    monkeypatch.setattr(DraftAdapters, "is_loading", property(lambda _: next(is_loading)))
    begin, ends = drafter._worker.begin, []

    def recorded(step):
        ends.extend((row.num_known_tokens, row.first_index) for row in step.ahead)
        begin(step)

    monkeypatch.setattr(drafter._worker, "begin", recorded)
    assert tokens_by(engine, requests(engine)) == reference[0.0]
    assert len(ends) > 5
    assert all(num_known == first_index for num_known, first_index in ends)
