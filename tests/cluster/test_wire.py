from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from specdec.step import (
    BlockTableDelta,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)

INT32 = st.integers(0, 2**31 - 1)
TOKENS = st.lists(INT32, max_size=8).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.builds(
    StepInput,
    step_id=st.integers(0, 2**60),
    released=TOKENS,
    admitted=st.lists(
        st.builds(
            SequenceAdmission, INT32, INT32, FLOATS, FLOATS, INT32, st.integers(0, 2**63 - 1), INT32
        ),
        max_size=4,
    ).map(tuple),
    block_table_deltas=st.lists(st.builds(BlockTableDelta, INT32, INT32, TOKENS), max_size=4).map(
        tuple
    ),
    rows=st.lists(st.builds(StepRow, INT32, INT32, TOKENS, INT32, st.booleans()), max_size=4).map(
        tuple
    ),
)
OUTPUTS = st.builds(
    VerifyOutput,
    step_id=st.integers(0, 2**60),
    rows=st.lists(st.builds(VerifiedRow, INT32, TOKENS), max_size=4).map(tuple),
)

DRAFT_STEPS = st.builds(
    lambda step, drafts: DraftStep(**vars(step), drafts=drafts),
    STEPS,
    st.lists(st.builds(DraftRow, INT32, INT32, TOKENS, INT32), max_size=4).map(tuple),
)
DRAFT_OUTPUTS = st.builds(
    DraftOutput,
    step_id=st.integers(0, 2**60),
    rows=st.lists(st.builds(DraftedRow, INT32, TOKENS), max_size=4).map(tuple),
)


@given(STEPS)
def test_a_step_arrives_as_it_was_sent(step):
    assert wire.decode_step(wire.encode_step(step)) == step


@given(OUTPUTS)
def test_an_output_arrives_as_it_was_sent(output):
    assert wire.decode_output(wire.encode_output(output)) == output


@given(DRAFT_STEPS)
def test_a_draft_step_arrives_as_it_was_sent(step):
    assert wire.decode_draft_step(wire.encode_draft_step(step)) == step


@given(DRAFT_OUTPUTS)
def test_drafts_arrive_as_they_were_sent(output):
    assert wire.decode_draft_output(wire.encode_output(output)) == output


def test_a_rank_can_report_an_error_instead():
    assert wire.error_in(wire.encode_error("RuntimeError: broken")) == "RuntimeError: broken"
    assert wire.error_in(wire.CAUGHT_UP) is None
    assert wire.error_in(wire.encode_output(VerifyOutput(7, ()))) is None
