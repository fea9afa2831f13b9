"""Trees and chains of a head answer alike; ratios are within rounds and between equal depths."""

import json

import pytest

from benchmarks.head_trees import (
    ShapedEngines,
    bars,
    case_name,
    gains_of,
    main,
    shape_name,
    shapes_of,
    summarize,
)
from benchmarks.prompts import load_prompts
from benchmarks.workloads import Measurement, StreamRecord
from specdec.text.tokenizer import Tokenizer
from specdec.types.drafts.draft_decision import chain, tree
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.heads import HEADS
from tests.specdec.spied_runs import SpiedTarget

NUM_TOKENS = 24
TREE = tree(8, 3)
SHAPES = shapes_of([TREE], [1])


def test_the_chain_of_each_trees_depth_is_measured():
    assert list(map(shape_name, SHAPES)) == [
        "none",
        "chain of 1",
        "chain of 3",
        "tree of 8, depth 3",
    ]


def stream(tokens_per_message, gap_s, num_messages=20):
    arrivals = tuple(1.0 + gap_s * index for index in range(num_messages + 1))
    return StreamRecord((5,) * (1 + tokens_per_message * num_messages), arrivals)


def test_trees_are_compared_with_their_chain_and_with_the_fastest_one():
    figures = {chain(0): (1, 0.01), chain(1): (2, 0.011), chain(3): (3, 0.02), TREE: (4, 0.02)}
    measured = {
        case_name(shape, temperature): [
            Measurement(9.0, (stream(count, factor * gap_s),)) for factor in (1, 2, 4)
        ]
        for shape, (count, gap_s) in figures.items()
        for temperature in (0.0, 0.8)
    }
    rows = {each.shape: each for each in summarize(measured, SHAPES) if each.temperature == 0.8}
    assert rows["chain of 1"].tokens_per_step == 2
    assert rows["chain of 1"].tokens_per_s == pytest.approx(2 / 0.022)
    assert rows["tree of 8, depth 3"].speedup == pytest.approx(2)
    assert rows["tree of 8, depth 3"].num_other_answers == 3, "the streams are not equally long"
    gain, other = gains_of(measured, SHAPES)
    assert (gain.tree, gain.temperature, other.temperature) == ("tree of 8, depth 3", 0.0, 0.8)
    assert gain.tokens_per_step == pytest.approx(4 / 3)
    assert gain.fastest_chain == "chain of 1"
    assert gain.tokens_per_s == pytest.approx(4 / 0.02 / (2 / 0.011))
    assert all(bar.is_met for bar in bars([gain, other]))


@pytest.mark.parametrize("given", ["8", "8:", "3:4", "65:4", "8:0", "a:b"])
def test_what_is_no_tree_is_refused(given, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--head", str(tmp_path), "--trees", given])
    assert "NODES" in capsys.readouterr().err


@pytest.fixture
def prompts_file(tmp_path):
    path, words = tmp_path / "prompts.jsonl", ("The river is wide", "Ask the baker for bread")
    lines = [{"id": word, "suite": "edit", "turns": [word]} for word in words]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def head(tiny_model_dir, prompts_file, tmp_path):
    """Return a head that is fitted to the greedy answers."""
    engine = local_engine(tiny_model_dir, engine_config())
    texts = []
    for each in load_prompts(prompts_file, Tokenizer(tiny_model_dir)):
        answer = run(engine, [request("a", each.token_ids, max_tokens=NUM_TOKENS)])["a"]
        texts.append([*each.token_ids, *answer.token_ids])
    return HEADS["eagle3"](tiny_model_dir, tmp_path / "head", texts)


def test_all_shapes_give_the_same_answers(tiny_model_dir, prompts_file, head, tmp_path, capsys):
    given = ["--head", head, "--model", tiny_model_dir, "--prompts", prompts_file]
    given += ["--trees", "8:3", "--chains", "1", "--rounds", "2", "--max-tokens", NUM_TOKENS]
    given += [
        "--quiet-limit-s",
        "0",
        "--threads",
        "1",
        "--cpu-time",
        "--output",
        tmp_path / "report.json",
    ]
    assert main(list(map(str, given))) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["method"] == "eagle3"
    rows = {(each["shape"], each["temperature"]): each for each in report["rows"]}
    assert len(rows) == 2 * len(SHAPES)
    assert {each["num_other_answers"] for each in report["rows"]} == {0}
    lengths = [rows[shape_name(each), 0.0]["tokens_per_step"] for each in SHAPES]
    assert lengths[0] == 1
    assert 1 < lengths[1] <= lengths[2] <= lengths[3]
    assert "tokens/step / chain of its depth" in printed


def test_an_engine_drafts_its_shape_in_every_step(tiny_model_dir, head, monkeypatch):
    targets = []

    class KeptTarget(SpiedTarget):
        def __init__(self, runner):
            super().__init__(runner)
            targets.append(self)

    monkeypatch.setattr("benchmarks.head_trees.LocalTarget", KeptTarget)
    engines = ShapedEngines(tiny_model_dir, head)
    for shape in SHAPES:
        run(engines.engine(shape), [request("a", [5, 9, 13, 40], max_tokens=NUM_TOKENS)])
        drafts = [row for step, _ in targets[-1].steps for row in step.rows if row.drafts]
        full = [row for row in drafts if row.num_draft_tokens == shape.num_draft_tokens]
        assert len(full) > 5 or not shape.depth
        assert all((row.parents is not None) == shape.is_tree for row in full)
        assert max((max(row.depths) for row in drafts), default=0) == shape.depth
