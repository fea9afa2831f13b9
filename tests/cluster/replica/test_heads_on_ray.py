"""`LLM` with a draft head on ranks that are Ray actors: the same tokens, some of them drafted.

The ranks hold the drafts of steps that are begun ahead.
"""

import pytest

from specdec import LLM, SamplingParams
from tests.cluster.replica.test_llm_on_ray import PARAMS, PROMPTS, run_program, token_ids_in
from tests.specdec.heads import HEADS
from tests.specdec.llm.models import arguments

COUNTERS = """
metrics = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
print("accepted", metrics["specdec:spec_decode_num_accepted_tokens"])
print("ahead", metrics["specdec:engine_steps_ahead"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("method", HEADS)
def test_ranks_on_ray_draft_with_a_head(tiny_model_dir, tmp_path, method, size):
    check(tiny_model_dir, tmp_path, method, size, {"method": method})


@pytest.mark.slow
def test_a_draft_model_on_ray_beside_a_head_of_a_detected_method(tiny_model_dir, tmp_path):
    fallback = {"method": "draft_model", "quantization": "int8"}
    stderr = check(tiny_model_dir, tmp_path, "eagle3", 2, {"fallback": fallback})
    assert "method eagle3, by its files" in stderr


def check(tiny_model_dir, tmp_path, method, size, keys):
    """Compare the tokens of ranks on Ray with those of no speculation; return the log."""
    with LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    expected = [each.outputs[0].token_ids for each in outputs]
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    head = HEADS[method](tiny_model_dir, tmp_path, texts)
    speculation = {"model": str(head), "policy": "threshold", **keys}
    done = run_program(
        tiny_model_dir,
        COUNTERS,
        tensor_parallel_size=size,
        distributed_executor_backend="ray",
        speculative_config=speculation,
        kernels="auto",
    )
    assert done.returncode == 0, done.stderr
    assert token_ids_in(done.stdout) == expected
    assert "taken for" in done.stderr, "the log names the format of the head"
    counts = dict(
        line.split()
        for line in done.stdout.splitlines()
        if line.startswith(("accepted ", "ahead "))
    )
    assert int(counts["accepted"]) > 0
    assert (int(counts["ahead"]) > 0) == (speculation.keys() & {"first", "fallback"} == set())
    return done.stderr


SWITCHES = """
import shutil
import threading

has_ended = threading.Event()
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def run():
    while not has_ended.is_set():
        for output in llm.generate(prompts, params, use_tqdm=False):
            print("switched", *output.outputs[0].token_ids)


running = threading.Thread(target=run)
head = llm.drafter_versions()[0].name
running.start()
for index in range(20):
    copy = f"{head}-{index}"
    shutil.copytree(head, copy)
    versions = llm.load_drafter(copy)
    shutil.rmtree(copy)
has_ended.set()
running.join()
print("version", versions[-1].number, versions[-1].state.value)
try:
    llm.load_drafter(copy)
except Exception as error:
    print("refused", type(error).__name__)
"""


@pytest.mark.slow
def test_20_switches_on_two_ranks_change_no_token_of_8_streams(tiny_model_dir, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm:
        outputs = llm.generate((PROMPTS * 3)[:8], params, use_tqdm=False)
    expected = [list(each.outputs[0].token_ids) for each in outputs]
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    head = HEADS["eagle3"](tiny_model_dir, tmp_path / "head", texts)
    done = run_program(
        tiny_model_dir,
        f"prompts = {(PROMPTS * 3)[:8]!r}" + SWITCHES,
        tensor_parallel_size=2,
        max_num_seqs=8,
        distributed_executor_backend="ray",
        speculative_config={"model": str(head), "policy": "threshold"},
        kernels="auto",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    switched = [list(map(int, words[1:])) for words in lines if words[:1] == ["switched"]]
    assert switched == expected * (len(switched) // 8)
    assert len(switched) >= 8
    assert ["version", "21", "active"] in lines
    assert ["refused", "ModelNotFoundError"] in lines
