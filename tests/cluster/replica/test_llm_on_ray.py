"""`LLM` with tensor parallelism on Ray: the same tokens, and no processes left."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from specdec import LLM, SamplingParams
from specdec.types.errors import InvalidValueError, SpecdecError
from tests.specdec.llm.models import arguments

ROOT = Path(__file__).parents[3]
PROMPTS = ["The river begins", "Every spring the people count", "Ask the baker"]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

PROGRAM = textwrap.dedent("""
    import sys
    from specdec import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = LLM(**{values!r})
    for output in llm.generate({prompts!r}, params, use_tqdm=False):
        print(*output.outputs[0].token_ids)
    {end}
""")


LOSE_A_RANK = f"""
import ray
ray.kill(llm._llm_engine._executor.target.ranks._workers[0])
for output in llm.generate({PROMPTS!r}, params, use_tqdm=False):
    print(*output.outputs[0].token_ids)
"""

TWO_AFTER_EACH_OTHER = textwrap.dedent("""
    import os, subprocess, ray
    from specdec import LLM, SamplingParams

    begin = ray.init

    def init(**options):
        global bystander
        bystander = subprocess.Popen(["sleep", "100"])
        return begin(**options)

    ray.init = init
    os.environ["RAY_AUTH_TOKEN"] = "mine"
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in range(2):
        with LLM(**{values!r}) as llm:
            for output in llm.generate({prompts!r}, params, use_tqdm=False):
                print(*output.outputs[0].token_ids)
        assert bystander.poll() is None, "it is no process of Ray"
        bystander.kill()
        print("variables", os.environ.get("RAY_AUTH_MODE"), os.environ["RAY_AUTH_TOKEN"])
""")


def run_program(directory, end="", program=PROGRAM, **changes):
    """Run in a new process: there is one Ray in a process, and it must end without help."""
    code = program.format(values=arguments(directory, **changes), prompts=PROMPTS, end=end)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def token_ids_in(stdout):
    """Return token IDs from the lines that contain only those: ranks may log, too."""
    lines = [line.split() for line in stdout.splitlines()]
    return [[int(word) for word in words] for words in lines if all(map(str.isdigit, words))]


def ray_processes():
    """Return the processes of any Ray on this machine, by ID."""
    named = ((process.pid, process.name()) for process in psutil.process_iter(["name"]))
    return {pid for pid, name in named if name.startswith(("ray::", "raylet", "gcs_server"))}


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "llm.shutdown()"], ids=["exit", "shutdown"])
def test_two_ranks_generate_the_same_tokens_as_one_and_end(tiny_model_dir, expected, end):
    before = ray_processes()
    speculation = {"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}
    done = run_program(tiny_model_dir, end, tensor_parallel_size=2, speculative_config=speculation)
    assert done.returncode == 0, done.stderr
    assert token_ids_in(done.stdout) == expected
    assert ray_processes() <= before


@pytest.mark.slow
def test_one_after_the_other_where_ray_was_imported_before(tiny_model_dir, expected):
    """Ray caches its authentication when imported; other processes are left alone."""
    before = ray_processes()
    done = run_program(tiny_model_dir, program=TWO_AFTER_EACH_OTHER, tensor_parallel_size=2)
    assert done.returncode == 0, done.stderr
    assert token_ids_in(done.stdout) == expected * 2
    assert done.stdout.count("variables None mine") == 2
    assert ray_processes() <= before


@pytest.mark.slow
def test_a_lost_rank_is_replaced_and_the_batch_goes_on(tiny_model_dir, expected):
    done = run_program(tiny_model_dir, LOSE_A_RANK, distributed_executor_backend="ray")
    assert done.returncode == 0, done.stderr
    assert token_ids_in(done.stdout) == expected * 2


def test_more_ranks_than_fit_are_refused_before_ray_starts(tiny_model_dir):
    with pytest.raises(
        InvalidValueError, match="tensor_parallel_size is 1000; it must be at most 9"
    ):
        LLM(**arguments(tiny_model_dir, tensor_parallel_size=1000, kv_cache_memory_gib=4))


def test_a_missing_cluster_package_is_reported(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("specdec.llm.llm_engine.entry_points", lambda **_: ())
    with pytest.raises(SpecdecError, match="several ranks need the executor 'ray'"):
        LLM(**arguments(tiny_model_dir, tensor_parallel_size=2))
