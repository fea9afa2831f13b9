# Modules: specdec.engine.scheduling.speculator
"""Predicted output in the engine: the tokens of no speculation in fewer steps, whatever drafts."""

from dataclasses import replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.scheduling.drafting import NO_DRAFTING
from specdec.sequences.prediction import PredictedText
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    engine_config,
    local_engine,
    make_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.grammars import grammar_compiler

PROMPT = [1, 2, 3, 4, 5, 6, 7]


class EditingTarget(HashTarget):
    """Writes an edited file after the prompt, whatever is drafted."""

    def __init__(self, written, block_size=4):
        super().__init__(block_size, 512)
        self._written = written

    def next_token(self, context):
        place = len(context) - len(PROMPT)
        return self._written[place] if place < len(self._written) else 0


def file_of(num_lines):
    """Return the tokens of a file of that many lines of eight tokens, many of them alike."""
    return [
        token
        for line in range(num_lines)
        for token in (10, 11 + line % 7, 20, 30 + line % 40, 21, 100 + line % 150, 22, 9)
    ]


def edited(tokens):
    """Rename a name in 20 places, delete five lines, insert four, and replace three."""
    lines = [tokens[start : start + 8] for start in range(0, len(tokens), 8)]
    for index in range(5, len(lines), 10):
        lines[index] = [*lines[index][:3], 400, *lines[index][4:]]
    del lines[60:65]
    lines[100:100] = [[10, 401, 20, 402 + line, 21, 403, 22, 9] for line in range(4)]
    lines[150:153] = [[10, 410, 20, 411 + line, 9] for line in range(3)]
    return [token for line in lines for token in line]


def predicting(original, **changes):
    prediction = PredictedText(original) if original else None
    return replace(request("edit", PROMPT, max_tokens=2000), prediction=prediction, **changes)


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_an_edited_file_of_200_lines_makes_three_tokens_a_step(tiny_model_dir, method):
    """Measured: 10.5 to 10.8 tokens a step, and 1.6 to 2.3 without the prediction."""
    original = file_of(200)
    written = edited(original)
    config = engine_config(
        max_model_len=2048,
        num_blocks=600,
        speculation=SpeculativeConfig.of(method, policy="threshold"),
    )
    steps = {}
    for prediction in ((), tuple(original)):
        engine = make_engine(tiny_model_dir, config, EditingTarget(written))
        edit = predicting(prediction, params=request("", PROMPT, max_tokens=len(written)).params)
        transcript = run(engine, [edit])["edit"]
        assert transcript.token_ids == written
        steps[bool(prediction)] = engine.stats().counts.num_steps
        stats = transcript.last.prediction
        assert bool(stats.num_drafts) == bool(prediction)
        assert stats.num_accepted_tokens <= transcript.last.speculation.num_accepted_tokens
    assert len(written) / steps[True] >= 3
    assert steps[True] < steps[False]


def predictions_of(plain):
    """Predictions of an output: itself, with other tokens among it, a part, and another text."""
    return {
        "exact": plain,
        "edited": [token + 1 if place % 7 == 3 else token for place, token in enumerate(plain)],
        "part": plain[5:17],
        "other": [5, 5, 5, 5, 5, 5],
        "long": plain * 9,
    }


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"stop_token_ids": [50], "min_tokens": 3},
    ],
    ids=["greedy", "sampled", "penalties", "stops"],
)
def test_tokens_are_those_without_a_prediction(tiny_model_dir, params):
    config = engine_config(3, max_num_batched_tokens=128)
    engine = local_engine(tiny_model_dir, config)
    plain = tokens_by(engine, [request("plain", PROMPT, **params)])["plain"]
    requests = [
        replace(request(name, PROMPT, **params), prediction=PredictedText(tokens))
        for name, tokens in predictions_of(plain).items()
    ]
    for name, tokens in tokens_by(engine, requests).items():
        assert tokens == plain, name


def test_each_choice_follows_the_prediction_by_itself(tiny_model_dir):
    engine = local_engine(tiny_model_dir, engine_config(3, max_num_batched_tokens=128))
    drawn = request("drawn", PROMPT, temperature=0.8, n=3, seed=5)

    def tokens(given):
        engine.add(given)
        by_choice = {choice: [] for choice in range(3)}
        while engine.has_work:
            for output in engine.step():
                by_choice[output.choice] += output.token_ids
        return by_choice, output

    plain, _ = tokens(drawn)
    for choice in range(3):
        predicted, last = tokens(replace(drawn, prediction=PredictedText(plain[choice])))
        assert predicted == plain
        assert last.prediction.num_accepted_tokens >= 20


def test_the_true_output_is_accepted_whole(tiny_model_dir):
    engine = local_engine(tiny_model_dir, engine_config(3))
    plain = tokens_by(engine, [request("plain", PROMPT)])["plain"]
    before = engine.stats().counts
    again = replace(request("again", PROMPT), prediction=PredictedText(plain))
    last = run(engine, [again])["again"].last
    counts = engine.stats().counts.minus(before)
    assert last.prediction == last.speculation
    assert last.prediction.num_rejected_tokens == 0
    assert counts.num_steps <= 5
    assert counts.accepted_by_method["prediction"][0] == last.prediction.num_drafts


def test_a_stop_within_a_draft_takes_the_place_of_the_targets_own_token(tiny_model_dir):
    """Every draft yields its accepted tokens and one more, also the last one of an output."""
    engine = local_engine(tiny_model_dir, engine_config(3))
    plain = tokens_by(engine, [request("plain", PROMPT)])["plain"]
    for count in range(2, 9):
        before = engine.stats().counts
        params = request("", PROMPT, stop_token_ids=(plain[count - 1],)).params
        stopped = replace(request("stopped", PROMPT), prediction=PredictedText(plain))
        transcript = run(engine, [replace(stopped, params=params)])["stopped"]
        last, counts = transcript.last, engine.stats().counts.minus(before)
        num_tokens = len(transcript.token_ids)
        assert transcript.token_ids == plain[:num_tokens]
        assert last.speculation.num_accepted_tokens + counts.num_steps == num_tokens
        assert counts.speculation == last.speculation
        num_predicted = last.prediction.num_accepted_tokens
        assert 0 <= num_predicted - last.speculation.num_accepted_tokens <= 1


def test_a_grammar_applies_to_predicted_drafts(tiny_model_dir):
    tokenizer, compiler = Tokenizer(tiny_model_dir), grammar_compiler(tiny_model_dir)
    form = StructuredOutput(regex="(ab|ba){6}")
    given = request("json", PROMPT, structured_output=form, ignore_eos=False)
    given = replace(given, grammar=compiler.compile(form))
    engine = local_engine(tiny_model_dir, engine_config(3))
    plain = tokens_by(engine, [given])
    for text in ("abbaab", "xyz"):
        predicted = replace(given, prediction=PredictedText(tokenizer.encode(text)))
        assert tokens_by(engine, [predicted]) == plain


@pytest.mark.parametrize(
    "options",
    [SpeculationOptions(enabled=False), SpeculationOptions(num_speculative_tokens=0)],
    ids=["disabled", "none"],
)
def test_a_request_that_opts_out_has_no_predicted_drafts(tiny_model_dir, options):
    engine = make_engine(tiny_model_dir, engine_config(3), HashTarget(4, 512))
    given = request("quiet", PROMPT, speculation=options)
    last = run(engine, [replace(given, prediction=PredictedText((10, 11, 12, 13)))])["quiet"].last
    assert last.prediction.num_drafts == last.speculation.num_drafts == 0


def test_the_number_in_a_request_limits_its_drafts(tiny_model_dir):
    target = HashTarget(4, 512)
    plain = target.continuation(PROMPT, 24)
    engine = make_engine(tiny_model_dir, engine_config(3), target)
    given = request("two", PROMPT, speculation=SpeculationOptions(num_speculative_tokens=2))
    last = run(engine, [replace(given, prediction=PredictedText(plain))])["two"].last
    assert last.prediction.num_draft_tokens <= 2 * last.prediction.num_drafts
    assert last.prediction.num_accepted_tokens == last.prediction.num_draft_tokens > 0


class FixedPolicy(SpeculationPolicy):
    """Decides the same in every step."""

    def __init__(self, decision):
        super().__init__(SpeculationControl("auto", 32, 3), lambda: 0.0)
        self._fixed = decision

    def decide(self, num_decoding, num_eligible=None, *prompts):
        super().decide(num_decoding, num_eligible, *prompts)
        self._decision = self._fixed
        return self._fixed


@pytest.mark.parametrize(
    ("reason", "drafts"),
    [
        (DecisionReason.GOODPUT, True),
        (DecisionReason.DRAFTER_UNAVAILABLE, True),
        (DecisionReason.OPERATOR, False),
        (DecisionReason.THRESHOLD, False),
        (DecisionReason.RULE, False),
    ],
)
def test_predictions_stop_where_load_or_an_operator_turns_drafts_off(
    tiny_model_dir, reason, drafts
):
    target = HashTarget(4, 512)
    plain = target.continuation(PROMPT, 24)
    proposer = ScriptedProposer(lambda tokens, most: ())
    policy = FixedPolicy(Decision(chain(0), reason))
    engine = make_engine(tiny_model_dir, engine_config(3), target, proposer, policy)
    other = request("other", PROMPT)
    given = replace(request("given", PROMPT), prediction=PredictedText(plain))
    done = run(engine, [given, other])
    assert done["given"].token_ids == done["other"].token_ids == plain
    assert bool(done["given"].last.prediction.num_drafts) == drafts
    assert done["other"].last.speculation.num_drafts == 0
    assert proposer.num_calls == 0, "the drafter was asked in a step without its drafts"


def test_other_requests_keep_their_drafts(tiny_model_dir):
    """A batch of predicted and plain requests: each has its own drafts."""
    target = HashTarget(4, 512)
    plain = target.continuation(PROMPT, 40)
    engine = make_engine(tiny_model_dir, engine_config(3, max_num_batched_tokens=128), target)
    given = replace(request("given", PROMPT, max_tokens=40), prediction=PredictedText(plain))
    done = run(engine, [given, request("other", PROMPT, max_tokens=40)])
    assert done["given"].token_ids == done["other"].token_ids == plain
    methods = engine.stats().counts.drafted_by_method
    assert methods["prediction"][0] > 0
    assert methods["ngram"][0] > 0


def test_steps_are_begun_ahead_once_the_output_has_left_the_prediction(tiny_model_dir):
    target = HashTarget(4, 512)
    plain = target.continuation(PROMPT, 60)
    policy = FixedPolicy(Decision(chain(0), DecisionReason.GOODPUT))
    engine = make_engine(
        tiny_model_dir, engine_config(3, async_scheduling=True), target, policy=policy
    )
    prediction = PredictedText((*plain[:20], *range(300, 320)))
    target.next_token = lambda context: (
        plain[len(context) - 7] if len(context) < 27 else 100 + len(context)
    )
    plain = [*plain[:20], *range(127, 167)]
    given = replace(request("given", PROMPT, max_tokens=60), prediction=prediction)
    assert tokens_by(engine, [given])["given"] == plain
    assert 30 < target.num_ahead < 40


def test_a_lost_place_is_found_again_while_steps_are_begun_ahead(tiny_model_dir):
    """The policy drafts nothing else, so that steps without a predicted draft begin ahead."""
    original = list(range(10, 130))
    written = [*original[:60], *range(300, 310), *original[60:]]
    num_steps = {}
    for is_async in (False, True):
        policy = FixedPolicy(Decision(chain(0), DecisionReason.GOODPUT))
        config = engine_config(3, async_scheduling=is_async)
        engine = make_engine(tiny_model_dir, config, EditingTarget(written), policy=policy)
        params = request("", PROMPT, max_tokens=len(written)).params
        transcript = run(engine, [predicting(original, params=params)])["edit"]
        assert transcript.token_ids == written
        num_steps[is_async] = engine.stats().counts.num_steps
    assert num_steps[True] <= 1.2 * num_steps[False]


def test_a_prediction_of_a_request_that_opts_out_keeps_no_step_from_beginning_ahead(
    tiny_model_dir,
):
    target = HashTarget(4, 512)
    policy = FixedPolicy(Decision(chain(0), DecisionReason.GOODPUT))
    config = engine_config(3, async_scheduling=True)
    engine = make_engine(tiny_model_dir, config, target, policy=policy)
    given = request("quiet", PROMPT, speculation=SpeculationOptions(enabled=False))
    run(engine, [replace(given, prediction=PredictedText((10, 11, 12, 13)))])
    counts = engine.stats().counts
    assert counts.num_steps_ahead >= counts.num_steps - 2


def test_without_predictions_no_row_is_looked_at(tiny_model_dir):
    class Rows(list):
        def __iter__(self):
            raise AssertionError("rows were searched for predicted output")

    engine = make_engine(tiny_model_dir, engine_config(3), HashTarget(4, 512))
    decision = Decision(chain(0), DecisionReason.GOODPUT)
    assert engine._drafts.take(Rows([None]), decision) is NO_DRAFTING
    assert not engine._drafts._is_predicted(Rows([None]))
