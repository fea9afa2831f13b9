# Modules: cluster.workers.messages.draft_serialization, cluster.workers.messages.frames
# Modules: cluster.workers.messages.row_serialization
# Modules: specdec.types.draft_messages
import pickle
from contextlib import suppress
from dataclasses import astuple, fields, is_dataclass

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.workers.messages import draft_serialization, serialization
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    AheadRow,
    Continuation,
    DraftedRow,
    DraftOutput,
    DraftPass,
    DraftRow,
    DraftStep,
)
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    DraftProbs,
    Logprobs,
    PromptLogprobs,
    RowDrafting,
    SequenceAdmission,
    Snapshot,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
    head_drafting,
)
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from tests.specdec.engines import HashTarget, engine_config, make_engine, request, run

INT32 = st.integers(0, 2**31 - 1)
SEQ_IDS = st.integers(0, 2**62)
COUNTS = st.integers(0, 3)
TOKENS = st.lists(INT32, max_size=8).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def arrays(dtype, *shape):
    return np.random.default_rng(sum(shape)).integers(0, 2**31, shape).astype(dtype)


def draft_probs(count, width):
    return DraftProbs(arrays(np.int32, count, width), arrays(np.float32, count, width))


def logprobs(count, width):
    values = arrays(np.float32, count, width)
    given = max(0, width - 2)
    return Logprobs(arrays(np.int32, count, width), values, arrays(np.int32, count), given)


@st.composite
def step_rows(draw):
    count, width, words = draw(COUNTS), draw(COUNTS), draw(COUNTS)
    return StepRow(
        draw(SEQ_IDS),
        draw(INT32),
        draw(TOKENS),
        count,
        draw(st.booleans()),
        draw(draftings(count, width)),
        arrays(np.int32, count + 1, words) if words else None,
        draw(COUNTS),
        draw(INT32),
        draw(INT32),
    )


@st.composite
def draftings(draw, count, width):
    head = [draw(COUNTS) for _ in range(5)]
    if draw(st.booleans()):
        return head_drafting(*head)  # which rows share
    probs, parents = draft_probs(count, width) if width else None, draw(TOKENS) or None
    return RowDrafting(
        probs, parents, tuple(draw(st.lists(TOKENS.filter(bool), max_size=3))), *head
    )


@st.composite
def drafts_of_ranks(draw):
    """Draft tokens, the parents of a tree or None for a chain, confidences, and the method."""
    tokens = draw(TOKENS)
    parents = tuple(range(-1, len(tokens) - 1)) if tokens and draw(st.booleans()) else None
    confidences = tuple(range(500, 500 + len(tokens))) if draw(st.booleans()) else ()
    return tokens, parents, confidences, bool(tokens) and draw(st.booleans())


@st.composite
def verified_rows(draw):
    tokens, width = draw(TOKENS), draw(COUNTS)
    return VerifiedRow(
        draw(SEQ_IDS),
        tokens,
        logprobs(len(tokens), width) if width else None,
        draw(st.booleans()),
        draw(TOKENS),
        *draw(drafts_of_ranks()),
    )


@st.composite
def drafted_rows(draw):
    tokens, width = draw(TOKENS), draw(COUNTS)
    return DraftedRow(draw(SEQ_IDS), tokens, draft_probs(len(tokens), width) if width else None)


RULES = st.builds(
    SamplingRules,
    temperature=FLOATS,
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.lists(st.tuples(INT32, FLOATS), max_size=2).map(tuple),
    bad_words=st.lists(TOKENS, max_size=2).map(tuple),
    allowed_token_ids=st.none() | TOKENS,
    verifier=st.builds(Verifier, threshold=FLOATS),
)
MARKS = ReasoningMarks(("b",), ("c", "d"), begins_inside=True)
GRAMMARS = st.none() | st.sampled_from(
    [StructuredOutput(json_schema="{}"), StructuredOutput(choice=("a", "ü"), reasoning=MARKS)]
)
SNAPSHOTS = st.builds(Snapshot, INT32, INT32)
STEPS = st.builds(
    StepInput,
    step_id=st.integers(0, 2**60),
    released=st.lists(SEQ_IDS, max_size=8).map(tuple),
    admitted=st.lists(
        st.builds(
            SequenceAdmission,
            *(SEQ_IDS, INT32, RULES, TOKENS, GRAMMARS, st.booleans(), st.none() | SNAPSHOTS),
        ),
        max_size=4,
    ).map(tuple),
    block_table_deltas=st.lists(st.builds(BlockTableDelta, SEQ_IDS, INT32, TOKENS), max_size=4).map(
        tuple
    ),
    rows=st.lists(step_rows(), max_size=4).map(tuple),
    saves=st.lists(st.tuples(SEQ_IDS, SNAPSHOTS), max_size=3).map(tuple),
)
PROMPT_LOGPROBS = st.builds(
    lambda seq_id, start, count, width: PromptLogprobs(seq_id, start, logprobs(count, width)),
    SEQ_IDS,
    INT32,
    COUNTS,
    st.integers(1, 3),
)
OUTPUTS = st.builds(
    VerifyOutput,
    step_id=st.integers(0, 2**60),
    rows=st.lists(verified_rows(), max_size=4).map(tuple),
    prompt_logprobs=st.lists(PROMPT_LOGPROBS, max_size=2).map(tuple),
)


@st.composite
def ahead_rows(draw):
    drafts, known = draw(TOKENS), draw(TOKENS)
    fan_out = draw(st.lists(COUNTS, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    return AheadRow(
        draw(SEQ_IDS),
        draw(INT32),
        known + drafts,
        len(drafts),
        tuple(fan_out),
        *(draw(INT32) for _ in range(3)),
    )


@st.composite
def continuations(draw):
    drafted = draw(TOKENS)
    probs = draft_probs(len(drafted), draw(st.integers(1, 3))) if draw(st.booleans()) else None
    return Continuation(draw(COUNTS), draw(INT32), drafted, probs)


AHEAD_OUTPUTS = st.builds(
    AheadOutput,
    step_id=st.integers(0, 2**60),
    rows=st.lists(
        st.builds(AheadDraft, SEQ_IDS, st.lists(continuations(), max_size=3).map(tuple)),
        max_size=3,
    ).map(tuple),
    passes=st.lists(st.builds(DraftPass, INT32, FLOATS), max_size=3).map(tuple),
    is_whole=st.booleans(),
)
DRAFT_STEPS = st.builds(
    lambda step, drafts, ahead: DraftStep(**vars(step), drafts=drafts, ahead=ahead),
    STEPS,
    st.lists(st.builds(DraftRow, SEQ_IDS, INT32, TOKENS, *[INT32] * 3), max_size=4).map(tuple),
    st.lists(ahead_rows(), max_size=3).map(tuple),
)
DRAFT_OUTPUTS = st.builds(
    DraftOutput,
    step_id=st.integers(0, 2**60),
    rows=st.lists(drafted_rows(), max_size=4).map(tuple),
)


def plain(value):
    """Return a value with lists in place of arrays, for comparison."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if is_dataclass(value):
        return type(value), [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, SampledTokens):
        value = value.rows
    return (type(value), *map(plain, value)) if isinstance(value, tuple) else value


@given(STEPS)
def test_a_step_arrives_as_it_was_sent(step):
    assert plain(serialization.decode_step(serialization.encode_step(step))) == plain(step)


DECODES = st.lists(
    st.builds(
        lambda seq_id, position, token, adapter_id, max_end: StepRow(
            seq_id, position, (token,), 0, True, adapter_id=adapter_id, max_end=max_end
        ),
        SEQ_IDS, INT32, st.just(PENDING_TOKEN) | INT32, INT32, INT32,
    ),
    max_size=4,
).map(tuple)  # fmt: skip


@pytest.mark.parametrize("deltas", [(), (BlockTableDelta(7, 2, (3, 4)), BlockTableDelta(8, 0, ()))])
@given(step_id=st.integers(0, 2**60), rows=DECODES)
def test_decodes_without_drafts_arrive_in_a_table_and_their_new_blocks(step_id, rows, deltas):
    step = StepInput(step_id, (), (), deltas, rows)
    frames = serialization.encode_step(step)
    assert len(frames) == 1 + bool(rows)
    assert serialization.decode_step(frames) == step


@given(st.integers(0, 2**60), st.lists(st.tuples(SEQ_IDS, INT32), max_size=4))
def test_single_tokens_arrive_in_two_frames(step_id, tokens):
    output = VerifyOutput(step_id, tuple(VerifiedRow(seq_id, (token,)) for seq_id, token in tokens))
    frames = serialization.encode_output(output)
    assert len(frames) == 2
    assert plain(serialization.decode_output(frames)) == plain(output)


def test_tokens_of_an_admission_are_not_copied(monkeypatch):
    """Lists may have the length of the vocabulary, and are encoded between two steps."""
    packed = []
    monkeypatch.setattr(serialization.msgpack, "packb", lambda header: packed.append(header) or b"")
    rules = SamplingRules(allowed_token_ids=(5, 6), logit_bias=((7, 1.0),), bad_words=((8, 9),))
    serialization.encode_step(StepInput(1, (), (SequenceAdmission(0, 3, rules),), (), ()))
    [(_, _, [[_, _, sent, verifier, *_]], _, _)] = packed
    assert verifier == astuple(rules.verifier)
    names = [each.name for each in fields(rules) if each.name != "verifier"]
    assert all(value is getattr(rules, name) for name, value in zip(names, sent, strict=True))


@given(OUTPUTS)
def test_an_output_arrives_as_it_was_sent(output):
    assert plain(serialization.decode_output(serialization.encode_output(output))) == plain(output)


@given(DRAFT_STEPS)
def test_a_draft_step_arrives_as_it_was_sent(step):
    assert plain(
        draft_serialization.decode_draft_step(draft_serialization.encode_draft_step(step))
    ) == plain(step)


@given(DRAFT_OUTPUTS)
def test_drafts_arrive_as_they_were_sent(output):
    assert plain(
        draft_serialization.decode_draft_output(draft_serialization.encode_draft_output(output))
    ) == plain(output)


@given(AHEAD_OUTPUTS)
def test_drafts_ahead_arrive_as_they_were_sent(output):
    frames = draft_serialization.encode_ahead_output(output)
    assert draft_serialization.is_ahead_output(frames)
    assert plain(draft_serialization.decode_ahead_output(frames)) == plain(output)


@given(DRAFT_OUTPUTS)
def test_other_answers_are_no_drafts_ahead(output):
    assert not draft_serialization.is_ahead_output(draft_serialization.encode_draft_output(output))
    assert not draft_serialization.is_ahead_output(serialization.CAUGHT_UP)


def test_a_rank_can_report_an_error_instead():
    assert (
        serialization.error_in(serialization.encode_error("RuntimeError: broken"))
        == "RuntimeError: broken"
    )
    assert serialization.error_in(serialization.CAUGHT_UP) is None
    assert serialization.error_in(serialization.encode_output(VerifyOutput(7, ()))) is None


class WritesAFile:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("extension", [None, 0, 127])
@pytest.mark.parametrize(
    "decode",
    [
        serialization.decode_step,
        draft_serialization.decode_draft_step,
        serialization.decode_output,
        draft_serialization.decode_draft_output,
        draft_serialization.decode_ahead_output,
    ],
)
def test_no_frame_is_unpickled(decode, extension, tmp_path):
    code = pickle.dumps(WritesAFile(tmp_path / "ran"))
    header = code if extension is None else msgpack.packb(msgpack.ExtType(extension, code))
    for count in range(1, 13):
        for rest in (b"", code):
            with suppress(Exception):
                decode([header] + [rest] * (count - 1))
    assert not (tmp_path / "ran").exists()
    pickle.loads(code).close()
    assert (tmp_path / "ran").exists(), "the object would have created it"


class SerializedTarget(HashTarget):
    """A target that receives and answers steps as they are sent to ranks.

    sent: the messages.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sent = []
        self._rows = ()

    def begin(self, step):
        self.sent.append(serialization.encode_step(step))
        received = serialization.decode_step(self.sent[-1], self._rows)
        assert [*received.rows] == [*step.rows]
        self._rows = received.rows
        super().begin(received)

    def collect(self):
        return serialization.decode_output(serialization.encode_output(super().collect()))


def test_a_step_that_repeats_the_one_before_takes_a_few_bytes(tiny_model_dir):
    config = engine_config(async_scheduling=True, block_size=16)
    target = SerializedTarget(config.block_size, 383)
    asked = [request(f"r{i}", [10 + i] * (20 + i), max_tokens=40) for i in range(6)]
    transcripts = run(make_engine(tiny_model_dir, config, target), asked)
    for each in asked:
        expected = target.continuation(each.prompt, 40)
        assert transcripts[each.request_id].token_ids == expected
    sent = zip(target.steps, target.sent, strict=True)
    repeats = [
        each for each in sent if isinstance(each[0].rows, RepeatedRows) and not each[0].rows.joining
    ]
    assert len(repeats) > 30
    num_deltas = [len(step.block_table_deltas) for step, _ in repeats]
    assert max(num_deltas) > 0
    for count, (_, frames) in zip(num_deltas, repeats, strict=True):
        assert sum(map(len, frames)) <= 16 + 28 * count


def test_ranks_take_the_drafts_that_they_hold(tiny_model_dir):
    speculation = SpeculativeConfig.of("medusa", 4, model="head")
    config = engine_config(speculation=speculation, async_scheduling=True)
    target = SerializedTarget(config.block_size, 383)
    target._head = lambda text, count: [
        token + (place == 2) for place, token in enumerate(target.continuation(text, count))
    ]
    prompts = [(10, 11, 12), (13, 14)]
    asked = [request(f"r{i}", prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    transcripts = run(make_engine(tiny_model_dir, config, target), asked)
    for each in asked:
        expected = target.continuation(each.prompt, 40)
        assert transcripts[each.request_id].token_ids == expected
    assert target.num_held > 15
