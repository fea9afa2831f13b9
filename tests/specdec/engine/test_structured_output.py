"""The real engine on the tiny model: output follows grammars, and speculation changes no token."""

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.engine.requests.outputs import TargetLostError
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import GrammarError, InvalidValueError, TargetFailedError
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from tests.specdec.engines import (
    HashTarget,
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
from tests.specdec.grammars import grammar_compiler
from tests.specdec.text.grammar.json_schemas import CASES
from tests.specdec.tiny import shuffled_llama_dir

PROMPT = list(range(40, 52))
SHORT = [each for each in CASES if each.name not in ("name", "capital", "free_integer")][::4]
REGEX = StructuredOutput(regex="(the|a) (river|bridge) is [a-z]{2,8} and [0-9]{1,3}")
AMBIGUOUS = StructuredOutput(grammar='start: x\nx: x x x | x x | /./ | ""')


@pytest.fixture(scope="module")
def ask(tiny_model_dir):
    """Return a function that makes requests for structured output."""
    compiler = grammar_compiler(tiny_model_dir)

    def make(name, spec, prompt=PROMPT, resume=(), **params):
        params = {"structured_output": spec, "max_tokens": 100, **params}
        made = request(name, prompt, **params)
        return replace(made, grammar=compiler.compile(spec), resume_token_ids=tuple(resume))

    return make


def engines(directory, **changes):
    return {
        "off": lambda group=None: local_engine(directory, engine_config(0, **changes), group),
        "ngram": lambda group=None: local_engine(directory, engine_config(4, **changes), group),
        "draft_model": lambda group=None: local_engine(
            directory, engine_config(4, **changes), group, draft_model(directory, group)
        ),
    }


def test_complete_outputs_are_valid_and_the_same_with_speculation(tiny_model_dir, ask):
    requests = [
        ask(
            f"{case.name} {temperature}",
            StructuredOutput(json_schema=case.text),
            temperature=temperature,
            seed=index,
        )
        for index, case in enumerate(SHORT)
        for temperature in (0.0, 1.0)
    ]
    generated = {
        name: run(make(), requests)
        for name, make in engines(tiny_model_dir, max_num_seqs=16).items()
    }
    num_ended = 0
    for case in SHORT:
        for temperature in (0.0, 1.0):
            name = f"{case.name} {temperature}"
            off = generated["off"][name]
            assert off.token_ids == generated["ngram"][name].token_ids
            assert off.token_ids == generated["draft_model"][name].token_ids
            if off.finish_reason is FinishReason.STOP:
                num_ended += 1
                case.validate(off.text)
    assert num_ended > 0.7 * len(requests)  # with random weights free text may not end


@pytest.mark.parametrize("verifier", ["rejection", "block", "typical", "threshold"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_verifier_follows_the_grammar(tiny_model_dir, ask, method, verifier):
    """Drafts with draft probabilities are not cut at the grammar: masks reject their tokens."""
    options = SpeculationOptions(verifier=verifier)
    requests = [
        ask(f"r{seed}", REGEX, temperature=1.0, seed=seed, speculation=options) for seed in range(6)
    ]
    engine = engines(tiny_model_dir)[method]()
    for transcript in run(engine, requests).values():
        assert transcript.finish_reason is FinishReason.STOP
        assert re.fullmatch(REGEX.regex, transcript.text)
    assert engine.stats().counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree(tiny_model_dir, ask, size):
    requests = [
        ask(f"r{temperature}", REGEX, temperature=temperature, seed=3) for temperature in (0.0, 1.0)
    ]
    for make in engines(tiny_model_dir).values():
        alone = tokens_by(make(), requests)
        for rank in run_ranks(size, lambda group, make=make: tokens_by(make(group), requests)):
            assert rank == alone


def test_preemption_and_chunks_change_no_token(tiny_model_dir, ask):
    spec = StructuredOutput(regex="[a-z]{70}")
    requests = [
        ask(f"r{i}", spec, prompt=[50 + i] * (5 + 4 * i), temperature=1.0, seed=i) for i in range(6)
    ]
    expected = tokens_by(engines(tiny_model_dir)["off"](), requests)
    tight = {"num_blocks": 40, "max_num_batched_tokens": 24}
    for make in engines(tiny_model_dir, **tight).values():
        engine = make()
        assert tokens_by(engine, requests) == expected
        assert engine.stats().counts.num_preemptions > 0


def test_forced_tokens_are_drafted_without_a_proposer(tiny_model_dir, ask):
    """The proposer drafts nothing, and yet nearly every token is an accepted draft token."""
    spec = StructuredOutput(choice=("the water under the bridge is the water in the sea",))
    engine = local_engine(tiny_model_dir, engine_config(4), proposer=ScriptedProposer(nothing))
    transcript = run(engine, [ask("r", spec)])["r"]
    stats = engine.stats()
    num_forced = len(transcript.token_ids) - 1  # without the end
    assert transcript.text == spec.choice[0]
    assert stats.counts.speculation.num_accepted_tokens == stats.counts.speculation.num_draft_tokens
    assert stats.counts.speculation.num_draft_tokens >= 0.7 * num_forced
    assert sum(stats.counts.drafted_by_method["structured_output"]) > 0
    assert stats.counts.drafted_by_method == stats.counts.accepted_by_method


def nothing(token_ids, count):
    return ()


def test_forced_tokens_are_not_drafted_for_a_request_that_opts_out(tiny_model_dir, ask):
    spec = StructuredOutput(choice=("the water under the bridge",))
    engine = local_engine(tiny_model_dir, engine_config(4))
    out = SpeculationOptions(enabled=False)
    assert run(engine, [ask("r", spec, speculation=out)])["r"].text == "the water under the bridge"
    assert engine.stats().counts.speculation.num_draft_tokens == 0


def test_drafts_are_cut_at_the_first_forbidden_token(tiny_model_dir, ask):
    """A proposer of forbidden tokens uses no draft slot."""
    spec = StructuredOutput(regex="[a-z ]{20}")
    proposer = ScriptedProposer(lambda token_ids, count: (1,) * count)
    engine = local_engine(tiny_model_dir, engine_config(4), proposer=proposer)
    run(engine, [ask("r", spec)])
    assert engine.stats().counts.speculation.num_draft_tokens == 0


def test_masked_drafts_of_the_model_itself_are_accepted(tiny_model_dir, ask):
    engine = engines(tiny_model_dir)["draft_model"]()
    run(engine, [ask(f"r{i}", REGEX, temperature=1.0, seed=i) for i in range(6)])
    stats = engine.stats().counts.speculation
    assert stats.num_accepted_tokens >= 0.98 * stats.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_in_another_vocabulary_are_cut_where_the_grammar_ends(
    tiny_model_dir, ask, tmp_path, temperature
):
    """Their worker has no grammar; forced tokens are drafted all the same."""
    directory = shuffled_llama_dir(tiny_model_dir, tmp_path)
    vocabulary = DraftVocabulary.between(directory, tiny_model_dir)
    proposer = draft_model(directory, vocabulary=vocabulary)
    engine = local_engine(tiny_model_dir, engine_config(4), proposer=proposer)
    asked = [ask(f"r{i}", REGEX, seed=i, temperature=temperature) for i in range(4)]
    plain = run(local_engine(tiny_model_dir, engine_config(0)), asked)
    for name, transcript in run(engine, asked).items():
        assert transcript.token_ids == plain[name].token_ids
        assert re.fullmatch(REGEX.regex, transcript.text)
    assert engine.stats().counts.speculation.num_accepted_tokens >= 10
    proposer.check_integrity()


def test_grammars_do_not_affect_other_requests(tiny_model_dir, ask):
    free = [request(f"f{i}", [60 + i] * 9, temperature=1.0, seed=i) for i in range(3)]
    alone = tokens_by(engines(tiny_model_dir)["off"](), free)
    for make in engines(tiny_model_dir).values():
        together = run(make(), [*free, ask("r", REGEX), ask("stuck", AMBIGUOUS)])
        assert {name: together[name].token_ids for name in alone} == alone
        assert together["r"].text


def test_a_stuck_grammar_ends_only_its_request(tiny_model_dir, ask):
    engine = local_engine(tiny_model_dir, engine_config(4))
    engine.add(ask("stuck", AMBIGUOUS, temperature=1.0, min_tokens=140, max_tokens=140))
    engine.add(ask("r", REGEX))
    outputs = []
    while engine.has_work:
        outputs.extend(engine.step())
        engine.check_integrity()
    errors = [output for output in outputs if output.error is not None]
    assert [(type(each.error), each.request_id) for each in errors] == [(GrammarError, "stuck")]
    assert FinishReason.STOP in [output.finish_reason for output in outputs]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_the_error_of_a_stuck_grammar_survives_the_loss_of_the_target(tiny_model_dir, ask):
    """Both happen as the same step begins."""

    class Target(HashTarget):
        def begin(self, step):
            if len(step.rows) == 1:
                raise TargetFailedError("lost")
            super().begin(step)

    engine = make_engine(tiny_model_dir, engine_config(), Target(4, 383))
    engine.add(ask("stuck", AMBIGUOUS))
    engine.add(request("r", PROMPT))
    engine.step()
    [stuck, _] = [seq for seq, _ in engine._steps.rows]
    stuck.constraint.follow = Mock(side_effect=GrammarError("stuck"))
    with pytest.raises(TargetLostError) as lost:
        engine.step()
    failed = [each.request_id for each in lost.value.outputs if each.error is not None]
    assert failed == ["stuck"]


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
@pytest.mark.parametrize("num_known", [1, 5, 9])
def test_a_resumed_request_continues_its_grammar(tiny_model_dir, ask, method, num_known):
    params = {"temperature": 1.0, "seed": 8}
    whole = tokens_by(engines(tiny_model_dir)["off"](), [ask("r", REGEX, **params)])["r"]
    resumed = ask("r", REGEX, resume=whole[:num_known], **params)
    rest = tokens_by(engines(tiny_model_dir)[method](), [resumed])["r"]
    assert whole[:num_known] + rest == whole


def test_resume_tokens_that_the_grammar_forbids_are_rejected(tiny_model_dir, ask):
    engine = local_engine(tiny_model_dir, engine_config(0))
    with pytest.raises(InvalidValueError, match="resume_token_ids"):
        engine.add(ask("r", REGEX, resume=[300, 301]))
    assert not engine.has_work


def test_the_end_of_the_grammar_overrides_ignore_eos_and_min_tokens(tiny_model_dir, ask):
    spec = StructuredOutput(choice=("yes", "no"))
    asked = ask("r", spec, ignore_eos=True, min_tokens=50)
    transcript = run(local_engine(tiny_model_dir, engine_config(3)), [asked])["r"]
    assert transcript.text in spec.choice
    assert transcript.finish_reason is FinishReason.STOP


def test_min_tokens_selects_longer_texts(tiny_model_dir, ask):
    spec = StructuredOutput(regex="a{0,30}")
    asked = ask("r", spec, min_tokens=12, temperature=1.0, seed=2, ignore_eos=False)
    transcript = run(local_engine(tiny_model_dir, engine_config(3)), [asked])["r"]
    assert len(transcript.token_ids) > 12 or transcript.text == "a" * 30


def test_a_restarted_target_continues_a_grammar(tiny_model_dir, ask):
    expected = tokens_by(engines(tiny_model_dir)["off"](), [ask("r", REGEX)])["r"]
    engine, spare = (engines(tiny_model_dir)["ngram"]() for _ in range(2))
    engine.add(ask("r", REGEX))
    tokens = []
    for step in range(40):
        if step == 3:
            engine.replace_target(spare._steps.target)
        for output in engine.step():
            tokens.extend(output.token_ids)
    assert tokens == expected


def test_masks_are_sent_with_the_rows_that_need_them(tiny_model_dir, ask):
    target = HashTarget(4, 383)
    engine = make_engine(tiny_model_dir, engine_config(0, max_num_batched_tokens=8), target)
    engine.add(ask("r", StructuredOutput(regex="(?s:.)*"), max_tokens=2))
    engine.add(request("free", PROMPT, max_tokens=2))
    while engine.has_work:
        engine.step()
    for step in target.steps:
        for row in step.rows:
            is_masked = row.grammar_mask is not None
            assert is_masked == (row.seq_id == 0 and row.samples)
            if is_masked:
                assert row.grammar_mask.shape == (row.num_draft_tokens + 1, 12)
