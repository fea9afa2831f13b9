"""Every verifier through the real engine on the tiny model, with both kinds of drafts."""

import shutil
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SERVED_VERIFIERS, VERIFIERS, SpeculationOptions
from specdec.worker import HeadFiles
from tests.combinations import every_value
from tests.specdec.engines import (
    ScriptedProposer,
    draft_model,
    engine_config,
    local_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.tiny import tiny_llama_dir

REPETITIVE = (11, 12, 13, 11, 12, 13, 11)
FOR_MANY = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_blocks": 1000,
    "max_queue_len": 1000,
}
LOSSLESS = ["coupled", "rejection", "block"]
SOMETIMES_SURE = 0.18  # some tokens after the prompt below are more probable, some less


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


@pytest.fixture(scope="module")
def near_model_dir(tiny_model_dir, tmp_path_factory):
    """Return the target with noise: a draft model that is right about half of the time."""
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data += 0.06 * weight.data.std() * noise
    directory = tmp_path_factory.mktemp("near")
    shutil.copytree(tiny_model_dir, directory, dirs_exist_ok=True)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def medusa_dir(tiny_model_dir, tmp_path_factory):
    """Return heads that are fitted to some of the likely texts after REPETITIVE."""
    engine = local_engine(tiny_model_dir, engine_config(0))
    asked = [
        request(str(i), REPETITIVE, seed=i, temperature=1.3, top_k=4, max_tokens=8)
        for i in range(20)
    ]
    texts = [[*REPETITIVE, *tokens] for tokens in tokens_by(engine, asked).values()]
    return fitted_medusa_dir(tiny_model_dir, tmp_path_factory.mktemp("medusa"), texts)


def options(verifier, **changes):
    """Return options; lossy verifiers are so lenient that they accept improbable tokens."""
    limits = {"acceptance_threshold": 0.01, "typical_epsilon": 0.01, "typical_delta": 0.1}
    return SpeculationOptions(verifier=verifier, **{**limits, **changes})


def requests(verifiers=SERVED_VERIFIERS, count=10, **params):
    """Return repetitive prompts, so that lookups find matches; some exceed a prefill chunk."""
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randint(3, 383, (count, 6), generator=generator).tolist()
    settings = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 20, **params}
    return [
        request(
            f"{verifiers[i % len(verifiers)]} {i}",
            piece * (2 + i),
            seed=70 + i,
            speculation=options(verifiers[i % len(verifiers)]),
            **settings,
        )
        for i, piece in enumerate(pieces)
    ]


def proposer_of(method, directory, group):
    return draft_model(directory, group) if method == "draft_model" else None


@pytest.mark.parametrize(
    ("draft", "num_blocks"),
    [
        ("itself", 60),
        pytest.param("ngram", 60, marks=pytest.mark.slow),
        pytest.param("other", 200, marks=pytest.mark.slow),
    ],
)
def test_mixed_verifiers_generate_the_same_on_every_rank(
    tiny_model_dir, other_model_dir, draft, num_blocks
):
    config = engine_config(3, num_blocks=num_blocks)
    directory = other_model_dir if draft == "other" else tiny_model_dir

    def generated(group):
        proposer = None if draft == "ngram" else draft_model(directory, group)
        engine = local_engine(tiny_model_dir, config, group, proposer)
        return tokens_by(engine, requests()), engine.stats()

    [(alone, stats)] = run_ranks(1, generated)
    assert stats.counts.speculation.num_accepted_tokens > (0 if draft == "other" else 10)
    assert (stats.counts.num_preemptions > 0) == (num_blocks < 200)
    ranks = run_ranks(2, generated)
    assert [tokens for tokens, _ in ranks] == [alone, alone]
    plain = tokens_by(local_engine(tiny_model_dir, engine_config(0)), requests(["coupled"]))
    for name, tokens in alone.items():
        if name.startswith("coupled"):
            assert tokens == plain[name], "others in the batch changed it"


@pytest.mark.parametrize(("verifier", "k"), every_value(LOSSLESS, [3, 1]))
def test_the_target_as_its_own_draft_is_nearly_always_right(tiny_model_dir, verifier, k):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(k), proposer=proposer)
    run(engine, requests([verifier], max_tokens=30, top_k=100))  # fewer than what is listed
    speculation = engine.stats().counts.speculation
    assert speculation.num_drafts > 50
    assert speculation.acceptance_rate >= 0.98
    assert speculation.mean_acceptance_length >= 0.98 * (k + 1) - 0.1  # last drafts are cut short


@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_greedy_text_is_the_same_with_every_lossless_verifier(
    tiny_model_dir, other_model_dir, verifier, method
):
    greedy = {"temperature": 0.0, "top_p": 1.0}
    proposer = proposer_of(method, other_model_dir, None)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    plain = local_engine(tiny_model_dir, engine_config(0))
    assert tokens_by(engine, requests([verifier], 4, **greedy)) == {
        name.replace("coupled", verifier): tokens
        for name, tokens in tokens_by(plain, requests(["coupled"], 4, **greedy)).items()
    }


@pytest.mark.parametrize(
    ("verifier", "temperature"),
    [("typical", 0.8), ("threshold", 0.0), ("confidence", 0.8), ("confidence", 0.0)],
)
def test_lossy_verifiers_accept_more_and_change_tokens(
    tiny_model_dir, other_model_dir, verifier, temperature
):
    def outcome(name):
        proposer = draft_model(other_model_dir)
        engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
        asked = requests([name], 6, temperature=temperature, top_p=1.0, max_tokens=40)
        generated = list(tokens_by(engine, asked).values())
        return generated, engine.stats().counts.speculation.acceptance_rate

    lossless, lossy = outcome("coupled"), outcome(verifier)
    assert lossy[0] != lossless[0]
    assert lossy[1] > lossless[1]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_outputs_end_at_max_tokens(tiny_model_dir, max_tokens):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    for name, generated in run(engine, requests(max_tokens=max_tokens)).items():
        assert len(generated.token_ids) == max_tokens
        assert generated.last.verifier == name.split()[0]


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_counters_of_a_hand_worked_case(tiny_model_dir, verifier):
    """The target is nearly deterministic; the second of three draft tokens is always wrong.

    The first token has no draft. Then each step drafts 3, accepts 1 and adds 1, so tokens 2 to 9
    take 4 steps. Token 10 leaves no room for a draft.
    """
    prompt = [5, 6, 7, 8]
    params = {"temperature": 1e-4, "max_tokens": 10}
    plain = local_engine(tiny_model_dir, engine_config(0))
    [text] = tokens_by(plain, [request("r", prompt, **params)]).values()

    def drafts(token_ids, count):
        coming = text[len(token_ids) - len(prompt) :][:count]
        return [token if i != 1 else (token + 1) % 383 for i, token in enumerate(coming)]

    proposer = ScriptedProposer(drafts)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    asked = request("r", prompt, speculation=options(verifier), **params)
    [generated] = run(engine, [asked]).values()
    assert generated.token_ids == text
    counts = generated.last.speculation
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 11, 4)
    assert engine.stats().counts.accepted_by_position == (4, 0, 0)


@pytest.fixture(scope="module")
def triple_probs(tiny_model_dir):
    """Return transformers' probabilities of the first three tokens after a prompt, with top_k 4."""
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()

    @lru_cache
    def after(tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double() / 1.3
        best = logits.topk(4)
        return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))

    def probs(prompt):
        found = {(): 1.0}
        for _ in range(3):
            found = {
                (*text, token): chance * prob
                for text, chance in found.items()
                for token, prob in after((*prompt, *text)).items()
            }
        return found

    return probs


class Dividing(GoodputChooser):
    """Drafts none, one or two tokens of a sequence, by those that were accepted before."""

    def choose(self, now_s, num_decoding, shapes, prompts):
        rule = SlotRule(0.4, AcceptanceHistory(1.0, 0.5))
        return Decision(chain(2), DecisionReason.GOODPUT, slots=rule)


def dividing_policy():
    chooser = Dividing(CostModel(CostTable((1,), (0,), ((1.0,),))), divides_slots=True)
    control = SpeculationControl("auto", 64, 2, allowed_verifiers=VERIFIERS)
    return SpeculationPolicy(control, lambda: 0.0, choosers={None: chooser})


def methods_and_verifiers():
    """Yield all pairs; make test has all verifiers of a draft model, and each kind of draft.

    Those of lookups have no distribution: the verifiers' own tests have deterministic drafts.
    """
    quick = {
        "ngram": [],
        "ngram, slots": [],
        "draft_model": LOSSLESS,
        "draft_model while it is sure": ["rejection"],
        "draft_model, budget": ["block"],
        "draft_model, slots": ["rejection"],
        "draft_model, outcomes": ["rejection"],
        "medusa": ["block"],
        "medusa, budget": [],
        "medusa, slots": [],
    }
    for method, verifier in product(quick, LOSSLESS):
        marks = () if verifier in quick[method] else pytest.mark.slow
        yield pytest.param(method, verifier, marks=marks)


@pytest.mark.parametrize(("method", "verifier"), list(methods_and_verifiers()))
def test_texts_have_the_distribution_of_transformers(
    tiny_model_dir, other_model_dir, near_model_dir, medusa_dir, triple_probs, verifier, method
):
    prompt = REPETITIVE
    config, head = engine_config(2, **FOR_MANY), None
    if method.startswith("medusa"):
        has_budget = method == "medusa, budget"
        speculation = SpeculativeConfig.of(
            "medusa", 2, model=str(medusa_dir), batch_budget=has_budget or None
        )
        config, head = replace(config, speculation=speculation), HeadFiles(medusa_dir)
    elif method == "draft_model, budget":
        shared = SpeculativeConfig.of(num_speculative_tokens=2, batch_budget=True)
        config = replace(config, speculation=shared)
    elif method == "draft_model, outcomes":
        ahead = SpeculativeConfig.of("draft_model", 2, async_drafting="outcomes")
        config = replace(config, speculation=ahead)
    is_sure = method == "draft_model while it is sure"
    proposer = (
        draft_model(near_model_dir, confidence_threshold=SOMETIMES_SURE)
        if is_sure
        else proposer_of(method.split(",")[0], other_model_dir, None)
    )
    if method == "draft_model, outcomes":
        proposer = draft_model(near_model_dir, num_blocks=2000)
        proposer._ahead.planner.end_step = lambda **_: None  # four outcomes, whatever the machine
    policy = dividing_policy() if method.endswith(", slots") else None
    engine = local_engine(tiny_model_dir, config, proposer=proposer, policy=policy, head=head)
    asked = [
        request(
            str(seed),
            prompt,
            seed=seed,
            temperature=1.3,
            top_k=4,
            max_tokens=6 if method == "draft_model, outcomes" else 4,
            speculation=options(verifier),
        )
        for seed in range(500)
    ]
    for each in asked:
        engine.add(each)
    texts = {each.request_id: () for each in asked}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    probs = triple_probs(prompt)
    places = {text: place for place, text in enumerate(probs)}
    found = np.array([places[text[:3]] for text in texts.values()])
    assert chi_square_p_value(found, np.array(list(probs.values()))) > FALSE_ALARM
    counts = engine.stats().counts.speculation
    if method in ("draft_model", "medusa", "medusa, budget"):
        assert counts.num_draft_tokens > 300
    if method == "draft_model, outcomes":
        hits = proposer.counts.ahead.hits
        assert hits["0"] > 600, "after prompts, and after rejections"
        assert sum(hits.values()) - hits["0"] > 25, "after accepted drafts"
    if is_sure:
        assert 1.2 < counts.num_draft_tokens / counts.num_drafts < 1.8, "drafts end alike"
        assert 0.2 < counts.acceptance_rate < 0.9


def test_scaling_the_draft_temperature_changes_acceptance_but_no_token(
    tiny_model_dir, other_model_dir
):
    def outcome(verifier, *, scales):
        proposer = draft_model(other_model_dir)
        engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
        prompts = requests([verifier], 6, top_p=1.0, max_tokens=30)
        asked = [
            request(
                each.request_id,
                each.prompt_token_ids,
                seed=each.seed,
                temperature=1.2,
                speculation=options(verifier, scale_draft_temperature=scales),
            )
            for each in prompts
        ]
        return tokens_by(engine, asked), engine.stats().counts.speculation

    plain, accepted = outcome("coupled", scales=False)
    scaled, scaled_accepted = outcome("coupled", scales=True)
    assert scaled == plain
    assert scaled_accepted != accepted
    assert outcome("rejection", scales=False) != outcome("rejection", scales=True)


@pytest.mark.parametrize("verifier", SERVED_VERIFIERS)
def test_the_default_verifier_is_the_services(tiny_model_dir, verifier):
    speculation = SpeculativeConfig.of(prompt_lookup_min=1, verifier=verifier)
    engine = local_engine(tiny_model_dir, engine_config(speculation=speculation))
    asked = [request("r", [5, 6, 5, 6]), request("s", [5], speculation=options("block"))]
    generated = run(engine, asked)
    assert generated["r"].last.verifier == verifier
    assert generated["s"].last.verifier == "block"


def test_a_verifier_that_the_service_does_not_allow_is_rejected(tiny_model_dir):
    allowed = ("coupled", "block")
    speculation = SpeculativeConfig.of(allowed_verifiers=allowed)
    engine = local_engine(tiny_model_dir, engine_config(speculation=speculation))
    for name, is_enabled in product(VERIFIERS, (None, False)):
        asked = request("r", [5], speculation=SpeculationOptions(is_enabled, verifier=name))
        if name in allowed:
            engine.add(asked)
            engine.abort("r")
            continue
        with pytest.raises(InvalidValueError) as error:
            engine.add(asked)
        assert error.value.field == "speculation.verifier"
        assert error.value.limit == "what the service allows: coupled, block"
