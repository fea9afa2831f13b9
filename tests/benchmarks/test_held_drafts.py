"""The rank alone runs the steps of an engine; shares are of its steps and expected tokens."""

import re
from dataclasses import replace

import pytest

from benchmarks.held_drafts import (
    ACCEPTANCE,
    AHEAD,
    ALONE,
    BEHIND,
    NUM_DRAFTS,
    RankAlone,
    bars,
    expected_tokens,
    gain,
    main,
    seed_of,
    summarize,
)
from benchmarks.workloads import Measurement, StreamRecord, Workload
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.heads import HEADS

PROMPT = tuple((31 * place) % 380 + 3 for place in range(24))


def test_a_rank_alone_yields_the_tokens_of_an_engine(tiny_model_dir, tmp_path):
    text = [(7 * place) % 380 + 3 for place in range(90)]
    head = HEADS["medusa"](tiny_model_dir, tmp_path, [text])
    alone = RankAlone(tiny_model_dir, head, None, "torch")
    (stream,) = alone.measure(Workload((PROMPT,), 60)).streams
    again = alone.measure(Workload((PROMPT,), 60)).streams[0]
    speculation = SpeculativeConfig.of(
        "medusa",
        NUM_DRAFTS,
        model=str(head),
        verifier="synthetic",
        synthetic_acceptance_rate=ACCEPTANCE,
    )
    config = engine_config(speculation=speculation, async_scheduling=True, block_size=16)
    engine = local_engine(tiny_model_dir, config, head=HeadFiles(head), kernels="torch")
    asked = request(
        "a", PROMPT, seed=seed_of(PROMPT), max_tokens=60, speculation=SpeculationOptions(True)
    )
    expected = run(engine, [asked])["a"].token_ids[: -NUM_DRAFTS - 1]  # drafts end with the request
    assert list(stream.token_ids[: len(expected)]) == expected
    assert again.token_ids == stream.token_ids
    assert 2 < (len(stream.token_ids) - 1) / len(stream.gaps_s) < 4.5


def stream(tokens_per_message, gap_s, num_messages=20):
    arrivals = tuple(1.0 + gap_s * index for index in range(num_messages + 1))
    return StreamRecord((5,) * (1 + tokens_per_message * num_messages), arrivals)


def test_shares_are_of_a_step_and_of_the_expected_tokens_of_the_rank():
    assert expected_tokens() == pytest.approx(3.3616)
    measured = {
        name: [Measurement(9.0, (stream(3, gap_s),))] * 3
        for name, gap_s in ((AHEAD, 0.0102), (BEHIND, 0.012), (ALONE, 0.01))
    }
    ahead, behind, alone = summarize(measured)
    assert (ahead.case, ahead.tokens_per_message) == (AHEAD, 3)
    assert alone.ms_per_message == pytest.approx(10)
    assert (alone.step_share, alone.share) == pytest.approx((1, 3 / 3.3616))
    assert (behind.step_share, behind.share) == pytest.approx((1 / 1.2, 3 / 3.3616 / 1.2))
    assert gain(measured) == pytest.approx(1.2 / 1.02)
    of_tokens, of_step = bars([ahead, behind, alone])
    assert of_tokens.figure == pytest.approx(3 / 3.3616 / 1.02)
    assert of_step.figure == pytest.approx(1 / 1.02), "not less for the tokens that were drawn"
    assert (of_tokens.is_met, of_step.is_met) == (False, True)
    _, slow = bars([replace(ahead, step_share=0.88)])
    assert not slow.is_met


def test_both_ratios_are_printed(monkeypatch, capsys, tmp_path):
    measured = {
        name: [Measurement(9.0, (stream(4, gap_s),))]
        for name, gap_s in ((AHEAD, 0.0125), (BEHIND, 0.015), (ALONE, 0.01))
    }
    monkeypatch.setattr("benchmarks.held_drafts.measure", lambda options, directory: measured)
    assert main(["--output", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert "of step  of tokens/s" in printed
    assert re.search(r"steps begun ahead +320\.0 +12\.500 +4\.00 +80\.0% +95\.2%", printed)
    assert "expected tokens of a step: 3.36" in printed


def test_every_prompt_draws_its_own_acceptance(tiny_model_dir, tmp_path):
    head = HEADS["medusa"](
        tiny_model_dir, tmp_path, [[(7 * place) % 380 + 3 for place in range(90)]]
    )
    alone = RankAlone(tiny_model_dir, head, None, "torch")
    streams = alone.measure(Workload((PROMPT, PROMPT[1:]), 60)).streams
    assert len({len(each.gaps_s) for each in streams}) == 2
