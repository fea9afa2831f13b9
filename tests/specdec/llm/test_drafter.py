"""Versions of a draft head through `LLM` and `AsyncLLM`."""

import shutil
import threading

import pytest

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.types.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from tests.specdec.heads import HEADS
from tests.specdec.llm.models import arguments, metrics_of

PARAMS = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True, seed=1)
PROMPTS = ["The river begins", "Every spring", "When will it open?", "Further south"] * 2


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm:
        yield llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(plain):
    return [each.outputs[0].token_ids for each in plain]


@pytest.fixture(scope="module")
def heads(tiny_model_dir, tmp_path_factory, plain):
    """Return a head that is fitted to the outputs, a copy, and one of another method."""
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in plain]
    root = tmp_path_factory.mktemp("heads")
    fitted = HEADS["medusa"](tiny_model_dir, root / "fitted", texts)
    shutil.copytree(fitted, root / "copy")
    return fitted, root / "copy", HEADS["mlp_speculator"](tiny_model_dir, root / "mlp", texts)


def speculation(head):
    return {"model": str(head), "num_speculative_tokens": 3, "policy": "threshold"}


@pytest.fixture(scope="module")
def llm(tiny_model_dir, heads):
    with LLM(**arguments(tiny_model_dir, speculative_config=speculation(heads[0]))) as llm:
        yield llm


def test_tokens_are_unchanged_while_versions_change(llm, heads, expected):
    [first] = llm.drafter_versions()
    assert (first.number, first.name, first.state) == (1, str(heads[0]), "active")
    results = []
    running = threading.Thread(
        target=lambda: results.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    )
    running.start()
    num_loads = 0
    while running.is_alive() or not num_loads:
        versions = llm.load_drafter(str(heads[1]))
        num_loads += 1
    running.join()
    assert [each.outputs[0].token_ids for each in results] == expected
    assert versions[-1].number == num_loads + 1
    assert versions[-1].state == "active"


def test_acceptance_and_metrics_by_version(llm, heads, expected):
    number = llm.load_drafter(str(heads[1]))[-1].number
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    last = llm.drafter_versions()[-1]
    metrics = metrics_of(llm)
    assert metrics["drafter_version"] == number
    assert last.speculation.num_drafts > 0
    assert last.acceptance is not None
    assert last.acceptance > 0.3
    drafted = metrics[f"spec_decode_num_drafts_by_version {number}"]
    assert drafted == last.speculation.num_drafts
    llm.use_drafter(1)
    assert llm.drafter_versions()[0].state == "active"


def test_heads_that_cannot_be_used(llm, heads, tmp_path):
    with pytest.raises(UnsupportedModelError, match="a version of the served head must be medusa"):
        llm.load_drafter(str(heads[2]))
    with pytest.raises(ModelNotFoundError):
        llm.load_drafter(str(tmp_path / "absent"))
    damaged = tmp_path / "damaged"
    shutil.copytree(heads[0], damaged)
    weights = damaged / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\xff\xff\xff\x7f"  # the last weight is not a number
    weights.write_bytes(bytes(content))
    message = rf"{damaged}, cannot be used: .*NaN or infinite"
    with pytest.raises(UnsupportedModelError, match=message):
        llm.load_drafter(str(damaged))
    with pytest.raises(InvalidValueError, match="version is 999"):
        llm.use_drafter(999)


def test_without_a_head_there_are_no_versions(tiny_model_dir):
    with (
        LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm,
        pytest.raises(InvalidValueError, match="drafter is 'none'; it must be"),
    ):
        llm.load_drafter("org/head")


async def test_streams_continue_while_a_version_is_loaded(tiny_model_dir, heads, expected):
    values = arguments(tiny_model_dir, speculative_config=speculation(heads[0]))
    async with AsyncLLM(**values) as llm:
        stream = llm.generate(PROMPTS[0], PARAMS, output_kind="cumulative")
        await anext(stream)
        versions = await llm.load_drafter(str(heads[1]))
        assert [each.state for each in versions] == ["ready", "active"]
        async for output in stream:
            last = output
        assert last.outputs[0].token_ids == expected[0]
        assert (await llm.use_drafter(1))[0].state == "active"
        assert len(await llm.drafter_versions()) == 2
