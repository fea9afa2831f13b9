"""Reference tests: matchers of a draft rank against new ones at every step."""

import numpy as np
import pytest

from specdec.types.messages import SequenceAdmission, StepInput
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.draft_grammars import DraftGrammars
from tests.specdec.grammars import grammar_compiler
from tests.specdec.shared_tokenizers import tokenizer_of

PROMPT = (5, 6, 7)
SPEC = StructuredOutput(regex="[a-z ]{200}")


@pytest.fixture(scope="module")
def compiler(tiny_model_dir):
    return grammar_compiler(tiny_model_dir)


def admit(grammars, *admissions, released=()):
    grammars.update(StepInput(0, released, admissions, (), ()))


def expected_mask(compiler, output):
    matcher = compiler.compile(SPEC).matcher()
    for token in output:
        matcher.advance(token)
    return matcher.allowed_mask()


def some_tokens(compiler, rng, output, count):
    matcher, tokens = compiler.compile(SPEC).matcher(), []
    for token in output:
        matcher.advance(token)
    for _ in range(count):
        bits = np.unpackbits(matcher.allowed_mask().view(np.uint8), bitorder="little")
        tokens.append(int(rng.choice(np.flatnonzero(bits))))
        matcher.advance(tokens[-1])
    return tokens


def test_matchers_follow_drafts_rejections_and_readmissions(compiler):
    rng, grammars = np.random.default_rng(0), DraftGrammars(compiler)
    output = some_tokens(compiler, rng, [], 3)
    admit(grammars, SequenceAdmission(1, len(PROMPT), SamplingRules(), (*PROMPT, *output), SPEC))
    known = 0  # tokens that the draft model has run, prompt included
    for step in range(30):
        whole = (*PROMPT, *output)
        grammars.move_to(1, known, whole[known:])
        assert (grammars.mask(1) == expected_mask(compiler, output)).all()
        drafts = some_tokens(compiler, rng, output, 3)
        for index, token in enumerate(drafts):
            grammars.move_to(1, len(whole) + index, (token,))
        num_true = int(rng.integers(0, 4))
        known = len(whole) + min(num_true, 2)
        output += drafts[:num_true] + some_tokens(compiler, rng, output + drafts[:num_true], 1)
        if step % 7 == 6:  # preempted; its tokens were in the prefix cache
            admission = SequenceAdmission(1, len(PROMPT), SamplingRules(), (*PROMPT, *output), SPEC)
            admit(grammars, admission, released=(1,))
        if len(output) > 40:
            break


def test_masks_after_a_rejected_draft_are_of_the_verified_text(compiler, tiny_model_dir):
    """A rejected `ae` and the verified `be` end in the same lexeme, and continue differently."""
    spec = StructuredOutput(grammar='start: "a" E "d" | "b" E "n"\nE: /e+/')
    tokenizer, start, grammars = tokenizer_of(tiny_model_dir), len(PROMPT), DraftGrammars(compiler)
    a, b, e = (tokenizer.encode(char, add_special_tokens=False)[0] for char in "abe")
    admit(grammars, SequenceAdmission(1, start, SamplingRules(), PROMPT, spec))
    for tokens in ((a, e), (b, e)):
        for index, token in enumerate(tokens):
            grammars.move_to(1, start + index, (token,))
        mask = grammars.mask(1)
    expected = compiler.compile(spec).matcher()
    for token in (b, e):
        expected.advance(token)
    assert (mask == expected.allowed_mask()).all()


def test_a_sequence_without_a_grammar_has_no_mask(compiler):
    grammars = DraftGrammars(compiler)
    admit(grammars, SequenceAdmission(1, 3, SamplingRules()))
    grammars.move_to(1, 0, (*PROMPT, 300))
    assert grammars.mask(1) is None
    assert not grammars.is_finished(1)


def test_an_invalid_grammar_or_output_has_no_mask(compiler):
    grammars = DraftGrammars(compiler)
    bad = StructuredOutput(regex="(a")
    admit(grammars, SequenceAdmission(1, 3, SamplingRules(), PROMPT, bad))
    admit(grammars, SequenceAdmission(2, 3, SamplingRules(), (*PROMPT, 1), SPEC))
    assert grammars.mask(1) is None
    assert grammars.mask(2) is None


def test_is_finished_when_only_an_end_is_allowed(compiler):
    grammars = DraftGrammars(compiler)
    spec = StructuredOutput(choice=("a", "b"))
    admit(grammars, SequenceAdmission(1, 3, SamplingRules(), PROMPT, spec))
    assert not grammars.is_finished(1)
    bits = np.unpackbits(grammars.mask(1).view(np.uint8), bitorder="little")
    grammars.move_to(1, 3, (int(np.flatnonzero(bits)[0]),))
    assert grammars.is_finished(1)
