"""A request with NaN or Inf logits ends alone: no token of another request changes."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.proposers import DraftModelProposer
from specdec.types.errors import BadLogitsError, NoTokenLeftError
from specdec.worker import LocalDraftWorker, LocalTarget, RankModel, load_draft, load_target
from tests.specdec.engines import ScriptedProposer, engine_config, make_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.models.passes import weights_of
from tests.specdec.tiny import tiny_llama_dir

POISON = 300
"""The token whose embedding is NaN or Inf."""
NUM_TOKENS = 20
END = 2


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory):
    """Return an untied model: a NaN in a tied embedding would be in the logits of every row."""
    return tiny_llama_dir(tmp_path_factory.mktemp("untied"), tied=False)


def poison(model, value):
    model = weights_of(model)
    if value is not None and POISON in model.embed_tokens.tokens:
        model.embed_tokens.weight[POISON - model.embed_tokens.tokens.start] = value


def engine_for(
    directory,
    value,
    group=None,
    proposer=None,
    quantization=None,
    drafts=3,
    kernels="auto",
    **changes,
):
    """Return an engine; value: of the embedding of POISON, None leaves it unchanged."""
    config = engine_config(drafts, **changes)
    group = group or TensorParallelGroup()
    runner = load_target(
        RankModel(directory, "float32", config, quantization=quantization, kernels=kernels), group
    )
    poison(runner.model, value)
    return make_engine(directory, config, LocalTarget(runner), proposer)


def text(index, length=30):
    return [3 + (11 * index + 5 * place % 35) % 290 for place in range(length)]


def sound(count=3, **params):
    """Return requests in which POISON never occurs."""
    return [
        request(
            f"sound {i}",
            text(i, 14 + 8 * i),
            seed=i,
            max_tokens=NUM_TOKENS,
            temperature=0.8 * (i % 2),
            bad_words=(),
            logit_bias={POISON: -100.0},
            **params,
        )
        for i in range(count)
    ]


def poisoned(name="poisoned", length=30, place=20):
    prompt = text(7, length)
    prompt[place] = POISON
    return request(name, prompt)


def texts(transcripts):
    return {name: each.token_ids for name, each in transcripts.items()}


@pytest.fixture(scope="module")
def undisturbed(untied_dir):
    return texts(run(engine_for(untied_dir, None), sound()))


@pytest.mark.parametrize(
    ("value", "num_ranks", "place"),
    [
        pytest.param(torch.nan, 1, 3, id="NaN in an early chunk"),
        pytest.param(torch.nan, 2, 29, id="NaN at the end"),
        pytest.param(torch.inf, 1, 29, id="inf at the end"),
        pytest.param(-torch.inf, 2, 3, id="-inf in an early chunk"),
    ],
)
def test_nan_logits_end_only_their_request(untied_dir, undisturbed, value, num_ranks, place):
    requests = [poisoned(place=place), *sound()]

    def of_rank(group):
        return run(engine_for(untied_dir, value, group, max_num_batched_tokens=24), requests)

    for transcripts in run_ranks(num_ranks, of_rank):
        ended = transcripts.pop("poisoned")
        assert isinstance(ended.error, BadLogitsError)
        assert (ended.token_ids, ended.finish_reason) == ([], None)
        assert texts(transcripts) == undisturbed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_later_owners_of_its_blocks_are_unaffected(untied_dir, undisturbed, num_ranks):
    """Few blocks, so that they are reused; one request begins like the poisoned one."""
    same_beginning = request("same beginning", [*text(7)[:20], 9, 10])
    expected = texts(run(engine_for(untied_dir, None), [same_beginning])) | undisturbed

    def of_rank(group):
        engine = engine_for(untied_dir, torch.nan, group, num_blocks=42, max_num_batched_tokens=12)
        for index in range(2):
            run(engine, [poisoned(f"p{index}")])
            generated = texts(run(engine, [*sound(), same_beginning]))
            assert generated == expected
        again = run(engine, [poisoned("again"), *sound(2)])
        assert again["again"].error is not None

    run_ranks(num_ranks, of_rank)


def test_a_quantized_target_keeps_rows_apart(untied_dir):
    def generated(requests, value):
        return run(engine_for(untied_dir, value, quantization="int8"), requests)

    transcripts = generated([poisoned(), *sound()], torch.nan)
    assert isinstance(transcripts.pop("poisoned").error, BadLogitsError)
    assert texts(transcripts) == texts(generated(sound(), None))


def test_tokens_before_the_nan_are_returned(untied_dir):
    """A bias generates POISON after a few tokens; the logits after it are NaN."""
    bias = {POISON: 7.0}
    params = {"temperature": 1.0, "logit_bias": bias, "max_tokens": 60}
    requests = [request(f"r{i}", text(i), seed=i, **params) for i in range(4)]
    plain = run(engine_for(untied_dir, None, drafts=0), requests)
    lengths = [each.token_ids.index(POISON) + 1 for each in plain.values()]
    assert max(lengths) > 2
    for drafts in (0, 3):
        proposers = [None]
        if drafts:
            proposers.append(ScriptedProposer(lambda tokens, count: [POISON] * count))
        for proposer in proposers:
            engine = engine_for(untied_dir, torch.nan, proposer=proposer, drafts=drafts)
            transcripts = run(engine, requests)
            for each, length in zip(requests, lengths, strict=True):
                generated = transcripts[each.request_id]
                assert generated.token_ids == plain[each.request_id].token_ids[:length]
                assert generated.error.num_output_tokens == length
            assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_draft_before_the_nan_counts_as_accepted(untied_dir):
    """A row that NaN logits cut ends in an accepted draft, not in a token of the target."""
    params = {"temperature": 1.0, "logit_bias": {POISON: 7.0}, "max_tokens": 60}
    asked = request("r", text(2), seed=2, **params)
    plain = run(engine_for(untied_dir, None, drafts=0), [asked])["r"]
    expected = plain.token_ids[: plain.token_ids.index(POISON) + 1]

    def right(tokens, count):
        return expected[len(tokens) - 30 :][:count]

    engine = engine_for(untied_dir, torch.nan, proposer=ScriptedProposer(right))
    generated = run(engine, [asked])["r"]
    assert generated.token_ids == expected
    speculation = engine.stats().counts.speculation
    assert 0 < speculation.num_draft_tokens == speculation.num_accepted_tokens


def test_a_draft_cannot_end_a_request(untied_dir, undisturbed):
    proposer = ScriptedProposer(lambda tokens, count: [POISON] * count)
    engine = engine_for(untied_dir, torch.nan, proposer=proposer)
    assert texts(run(engine, sound())) == undisturbed
    assert engine.stats().counts.speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_draft_model_with_nan_weights_still_drafts(untied_dir, undisturbed, value):
    limits = DraftLimits(num_blocks=200, block_size=4, max_model_len=160, max_catch_up_tokens=16)
    runner = load_draft(RankModel(untied_dir, "float32", limits), TensorParallelGroup())
    weights_of(runner.model).embed_tokens.weight[:] = value
    proposer = DraftModelProposer(LocalDraftWorker(runner), limits)
    config = SpeculativeConfig.of("draft_model", 3)
    engine = engine_for(untied_dir, None, proposer=proposer, speculation=config)
    assert texts(run(engine, sound())) == undisturbed
    assert engine.stats().counts.speculation.num_drafts > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_that_mask_every_token_end_their_request(untied_dir, undisturbed, num_ranks):
    nothing = request("nothing", text(5), allowed_token_ids=(END,), min_tokens=2, max_tokens=9)

    def of_rank(group):
        return run(engine_for(untied_dir, None, group), [nothing, *sound()])

    transcripts = run_ranks(num_ranks, of_rank)[0]
    assert isinstance(transcripts.pop("nothing").error, NoTokenLeftError)
    assert texts(transcripts) == undisturbed


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_logit_of_a_masked_token_is_an_error(tiny_model_dir, tmp_path, value, kernels):
    """The embedding is tied to the head, so that one token's logit is NaN in every row."""
    directory = shutil.copytree(tiny_model_dir, tmp_path / "poisoned")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = value
    save_file(tensors, directory / "model.safetensors")
    engine = engine_for(directory, None, kernels=kernels)
    generated = run(engine, [request("r", text(1), allowed_token_ids=(5, 6, 7))])["r"]
    assert isinstance(generated.error, BadLogitsError)
