# Modules: specdec.models.hybrid, specdec.kernels.reference.state_pool
"""Models with recurrent layers: no token depends on drafts, batches, snapshots or ranks."""

import random
from dataclasses import replace

import pytest
import torch

from specdec.kernels import backend
from specdec.kernels.cpu import native_library
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.cpu_decoder import NativeDecoder
from specdec.types.errors import BadLogitsError
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engines import (
    ScriptedProposer,
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.passes import weights_of
from tests.specdec.tiny import train_tokenizer

NUM_TOKENS = 16
QUICK = "qwen3-next"
FAMILIES = [
    name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS
]
POISON = 300
"""The token whose embedding is NaN."""

SMALL_POOL = {"max_model_len": 96, "num_blocks": 28}
TEMPERATURES = pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8]
)


COMPILED = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
KERNELS = ["torch", pytest.param("auto", marks=COMPILED)]
ON_BOTH_KERNELS = pytest.mark.parametrize("kernels", KERNELS, indirect=True)
"""For the tests of what the kernels do themselves; `make test` runs the others on one."""

ON_ONE = [pytest.param("torch", marks=pytest.mark.slow), "auto"]


@pytest.fixture(scope="module", autouse=True, params=ON_ONE if native_library() else ["torch"])
def kernels(request):
    """Select the kernels of all models: native ones, if a model has them, or torch's."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(backend, "native_library", lambda: None)
        yield request.param


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    train_tokenizer(383).save_pretrained(directory)
    return directory


def hybrid_config(num_draft_tokens, **changes):
    own = {"keeps_guesses": True, "num_snapshots": 6, "snapshot_interval": 4}
    return engine_config(num_draft_tokens, **(own | changes))


def requests(temperature=0.0, count=6, **params):
    """Return repetitive prompts, so that lookups find matches; some exceed a prefill chunk."""
    generator = random.Random(5)
    pieces = [[generator.randrange(3, 383) for _ in range(6)] for _ in range(count)]
    values = {"temperature": temperature, "max_tokens": NUM_TOKENS, **params}
    return [
        request(f"r{index}", piece * (2 + 2 * index), seed=70 + index, **values)
        for index, piece in enumerate(pieces)
    ]


@pytest.fixture(scope="module")
def expected(directory, kernels):
    """Return the tokens of each request alone, without drafts, by temperature."""
    found = {}
    for temperature in (0.0, 0.8):
        engine = local_engine(directory, hybrid_config(0, enable_prefix_caching=False))
        found[temperature] = {}
        for each in requests(temperature=temperature):
            found[temperature] |= tokens_by(engine, [each])
    return found


def continued(directory, config, known, group=None):
    """Return the tokens of texts that continue earlier ones by three tokens, and the engine.

    After a run of the first, they continue it from its end, or from its middle.
    """
    each_of = requests(temperature=0.8)[3:]
    texts = [[*each.prompt, *known[each.request_id]] for each in each_of]
    engine = local_engine(directory, config, group, guesses(texts))
    found = tokens_by(engine, each_of)
    assert found == {each.request_id: known[each.request_id] for each in each_of}
    return engine, tokens_by(engine, continuations(each_of, texts))


def continuations(each_of, texts):
    return [
        replace(each, request_id=f"{each.request_id}+{end}", prompt=(*text[:end], 7, 8, 9))
        for each, text in zip(each_of, texts, strict=True)
        for end in (len(text), 30)
    ]


def guesses(texts, seed=0):
    """Return a proposer of drafts from known texts, most of them with a wrong token."""
    generator = random.Random(seed)

    def draft(token_ids, most):
        known = (each for each in texts if each[: len(token_ids)] == token_ids)
        text = next(known, [])  # none of a text that a planted fault has changed
        found = text[len(token_ids) :][: generator.randrange(most + 1)]
        if found and generator.random() < 0.7:
            place = generator.randrange(len(found))
            found[place] = (found[place] + 1) % 383
        return found

    return ScriptedProposer(draft)


def with_guesses(directory, expected, each_of, config, group=None):
    """Return the tokens of requests, most of whose drafts are rejected at a random place."""
    texts = [[*each.prompt, *expected[each.request_id]] for each in each_of]
    return tokens_by(local_engine(directory, config, group, guesses(texts)), each_of)


@ON_BOTH_KERNELS
@TEMPERATURES
@pytest.mark.parametrize(
    "changes",
    [{}, SMALL_POOL, {"async_scheduling": True, "max_num_seqs": 3}],
    ids=["batch", "preempted", "async"],
)
def test_drafts_change_no_token(directory, expected, temperature, changes):
    config, known = hybrid_config(5, **changes), expected[temperature]
    assert with_guesses(directory, known, requests(temperature=temperature), config) == known


def test_rejected_drafts_and_preemptions_occur(directory, expected):
    """The test above relies on it."""
    texts = [[*each.prompt, *expected[0.0][each.request_id]] for each in requests()]
    engine = local_engine(directory, hybrid_config(5, **SMALL_POOL), None, guesses(texts))
    tokens_by(engine, requests())
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert 0 < counts.speculation.num_accepted_tokens < counts.speculation.num_draft_tokens


@TEMPERATURES
def test_ranks_generate_the_same(directory, expected, temperature):
    known, each_of = expected[temperature], requests(temperature=temperature)

    def generate(group):
        return with_guesses(directory, known, each_of, hybrid_config(5), group)

    assert run_ranks(2, generate) == [known] * 2


@TEMPERATURES
def test_a_draft_model_changes_no_token(directory, expected, tiny_model_dir, temperature):
    each_of = requests(temperature=temperature)
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(directory, hybrid_config(3), None, proposer)
    assert tokens_by(engine, each_of) == expected[temperature]


@TEMPERATURES
def test_lookups_for_steps_begun_ahead_change_no_token(directory, expected, temperature):
    engine = local_engine(directory, hybrid_config(4, async_scheduling=True))
    assert tokens_by(engine, requests(temperature)) == expected[temperature]
    counts = engine.stats().counts
    assert counts.speculation.num_draft_tokens > 0
    assert counts.num_steps_ahead > 0


@pytest.fixture(scope="module")
def expected_continuations(directory, expected):
    """Return the tokens of `continued`, each text computed alone and from its first token on."""
    engine = local_engine(directory, hybrid_config(0, enable_prefix_caching=False))
    each_of = requests(temperature=0.8)[3:]
    texts = [[*each.prompt, *expected[0.8][each.request_id]] for each in each_of]
    found = {}
    for each in continuations(each_of, texts):
        found |= tokens_by(engine, [each])
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"async_scheduling": True}, {"num_draft_tokens": 5}],
    ids=["plain", "async", "drafts"],
)
def test_cached_prompts_change_no_token(directory, expected, expected_continuations, changes):
    config = hybrid_config(**{"num_draft_tokens": 0, "num_snapshots": 40, **changes})
    engine, found = continued(directory, config, expected[0.8])
    assert found == expected_continuations
    assert engine.stats().counts.num_cached_tokens >= 200


def test_ranks_continue_cached_prompts_alike(directory, expected, expected_continuations):
    def generate(group):
        config = hybrid_config(5, num_snapshots=40)
        return continued(directory, config, expected[0.8], group)[1]

    assert run_ranks(2, generate) == [expected_continuations] * 2


def test_a_snapshot_of_another_block_changes_tokens(
    directory, expected, expected_continuations, monkeypatch
):
    if QUICK not in directory.name:
        pytest.skip("the states of the other tiny models fade before the prompt ends")
    resume = StatePool.resume

    def resume_another(self, slot, snapshot, position):
        resume(self, slot, (snapshot + 1) % 40, position)

    monkeypatch.setattr(StatePool, "resume", resume_another)
    config = hybrid_config(0, num_snapshots=40)
    assert continued(directory, config, expected[0.8])[1] != expected_continuations


def test_preempted_sequences_resume_from_snapshots(directory, expected):
    known = expected[0.8]
    engine = local_engine(directory, hybrid_config(0, **SMALL_POOL))
    assert tokens_by(engine, requests(temperature=0.8)) == known
    counts = engine.stats().counts
    assert counts.num_preemptions > 0
    assert counts.num_resumed_tokens > 16 * counts.num_preemptions


def test_choices_share_the_state_after_their_prompt(directory):
    [alone] = requests(0.8, count=1)
    each = replace(alone, prompt=(*range(10, 43),), params=replace(alone.params, n=3))
    engine = local_engine(directory, hybrid_config(0, num_snapshots=40))
    plain = local_engine(directory, hybrid_config(0, enable_prefix_caching=False))

    def choices(engine):
        found = {choice: [] for choice in range(3)}
        engine.add(each)
        while engine.has_work:
            for output in engine.step():
                found[output.choice] += output.token_ids
        return found

    assert choices(engine) == choices(plain)
    assert engine.stats().counts.num_resumed_tokens == 2 * 32


def test_aborted_sequences_leave_no_state(directory, expected):
    known, [first, second, *others] = expected[0.8], requests(temperature=0.8)
    engine = local_engine(directory, hybrid_config(4, max_num_seqs=3, async_scheduling=True))
    for each in (first, second):
        engine.add(each)
    for _ in range(6):
        engine.step()
    for each in (first, second):
        engine.abort(each.request_id)
    found = tokens_by(engine, others)
    assert found == {each.request_id: known[each.request_id] for each in others}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))]
)
def test_random_histories(directory, expected, seed):
    """Requests are added and aborted at random, in a small pool, with and without drafts.

    Most prompts are cached from a request before, with the same salt or another.
    """
    generator, known = random.Random(seed), {}
    texts = [
        [*each.prompt, *expected[temperature][each.request_id]]
        for temperature in expected
        for each in requests(temperature)
    ]
    is_async, budget = generator.random() < 0.5, generator.choice((8, 20, 64))
    config = hybrid_config(
        generator.randrange(1, 6),
        **SMALL_POOL,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        async_scheduling=is_async,
        enable_prefix_caching=generator.random() < 0.8,
        num_snapshots=generator.choice((1, 4, 20)),
    )
    proposer = guesses(texts, seed) if generator.random() < 0.7 else None
    engine, found = local_engine(directory, config, None, proposer), dict[str, list[int]]()
    for index in range(14):
        temperature = generator.choice((0.0, 0.8))
        each = generator.choice(requests(temperature))
        options = SpeculationOptions(enabled=generator.random() < 0.8)
        name = f"{each.request_id}-{index}"
        known[name], found[name] = expected[temperature][each.request_id], []
        params = replace(each.params, speculation=options)
        salt = generator.choice(("", "", "salt"))
        engine.add(replace(each, request_id=name, params=params, cache_salt=salt))
        for _ in range(generator.randrange(8)):
            for output in engine.step() if engine.has_work else ():
                found[output.request_id] += output.token_ids
            engine.check_integrity()
        if generator.random() < 0.2:
            engine.abort(generator.choice(list(found)))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert all(tokens == known[name][: len(tokens)] for name, tokens in found.items())
    assert sum(len(tokens) == NUM_TOKENS for tokens in found.values()) > 5


@ON_BOTH_KERNELS
@pytest.mark.parametrize("is_async", [False, True])
def test_a_draft_with_nan_is_computed_again_without_it(directory, is_async):
    """Torch's attention multiplies the NaN of the draft by 0, so that the row's state is NaN."""
    config = hybrid_config(3, async_scheduling=is_async)
    if ModelConfig.from_directory(directory).tie_word_embeddings:
        pytest.skip("a NaN in a tied embedding is in the logits of every row")
    each_of = requests(0.8, logit_bias={POISON: -100.0})
    expected = tokens_by(local_engine(directory, config), each_of)
    runner = load_target(RankModel(directory, "float32", config), TensorParallelGroup())
    weights_of(runner.model).embed_tokens.weight[POISON] = torch.nan
    drafts = ScriptedProposer(lambda token_ids, most: [POISON] * (most and len(token_ids) % 5 == 0))
    engine = make_engine(directory, config, LocalTarget(runner), drafts)
    assert tokens_by(engine, each_of) == expected
    is_native = isinstance(runner.model, NativeDecoder)
    assert (engine.stats().counts.num_preemptions > 0) == (not is_native)
    [failed] = run(engine, [request("poisoned", [5, POISON, 6])]).values()
    assert isinstance(failed.error, BadLogitsError)
    assert tokens_by(engine, each_of) == expected


def committed_with_a_guess(self, chunk, first):
    """Commit the state after the first guess too, as if it were rolled back by one less."""
    span = ADVANCE(self, chunk, first)
    return span._replace(
        num_known=span.num_known + (span.num_kept > 0), num_kept=max(0, span.num_kept - 1)
    )


def of_another_slot(self, chunk, first):
    """Use the states of the next slot after a draft of which tokens were accepted."""
    span = ADVANCE(self, chunk, first)
    return span._replace(slot=(span.slot + (span.num_replayed > 0)) % self.num_slots)


def of_the_last_sequence(self, slot, *, is_checked=True):
    """Leave what the last sequence had in a slot."""
    kept = self.inputs[:, slot].clone(), self.memory[:, slot].clone()
    RESET(self, slot, is_checked=is_checked)
    self.inputs[:, slot], self.memory[:, slot] = kept


ADVANCE, RESET = StatePool._advance, StatePool.reset


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("_advance", committed_with_a_guess),
        ("_advance", of_another_slot),
        ("reset", of_the_last_sequence),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_faults_change_tokens(directory, expected, monkeypatch, method, fault):
    if method == "reset" and QUICK not in directory.name:
        pytest.skip("the states of the other tiny models fade before the prompt ends")
    monkeypatch.setattr(StatePool, method, fault)
    config = hybrid_config(5, max_num_seqs=3)
    found = {
        temperature: with_guesses(directory, known, requests(temperature), config)
        for temperature, known in expected.items()
    }
    assert found != expected
