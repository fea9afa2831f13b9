"""Whole programs on SmolLM2: a hundred prompts by each method, vLLM's example, and the guide's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams
from specdec.llm import Counter, Vector
from tests.specdec.llm.models import metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.model]

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m-instruct"
SUBJECTS = [
    "rivers",
    "bread",
    "roads",
    "winter",
    "music",
    "clocks",
    "salt",
    "maps",
    "birds",
    "ice",
]
PROMPTS = [
    f"{verb} about {subject}. {subject.capitalize()}, {subject}, {subject}:"
    for subject in SUBJECTS
    for verb in ("Write", "Talk", "Read", "Think", "Learn", "Ask", "Sing", "Draw", "Plan", "Know")
]
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
LIMITS = {"max_model_len": 256, "max_num_seqs": 32}


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def generated():
    """Return the tokens of the model without drafts."""
    with LLM(MODEL, speculative_config=None, **LIMITS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return tokens([*outputs, *llm.chat(CHAT, GREEDY, use_tqdm=False)])


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix", "num_speculative_tokens": 6},
        {"method": "draft_model", "num_speculative_tokens": 3, "quantization": "int8"},
    ],
    ids=lambda speculation: speculation["method"],
)
def test_a_hundred_prompts_a_chat_and_their_counts(speculation, generated, capfd):
    with LLM(MODEL, speculative_config=speculation | {"policy": "threshold"}, **LIMITS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        outputs += llm.chat(CHAT, GREEDY)
        counted = metrics_of(llm)
    assert "Processed prompts: 100%" in capfd.readouterr().err
    assert tokens(outputs) == generated
    drafts = [output.speculation for output in outputs]
    assert counted["requests_received"] == len(outputs) == 101
    assert counted["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in outputs)
    assert counted["generation_tokens"] == sum(map(len, tokens(outputs)))
    assert counted["spec_decode_num_drafts"] == sum(each.num_drafts for each in drafts)
    assert counted["spec_decode_num_draft_tokens"] == sum(each.num_draft_tokens for each in drafts)
    num_accepted = sum(each.num_accepted_tokens for each in drafts)
    assert counted["spec_decode_num_accepted_tokens"] == num_accepted > 0
    assert sum(counted["spec_decode_num_accepted_tokens_per_pos"]) == num_accepted


def test_a_program_for_vllm_with_its_metric_names(capsys):
    """The calls and comparisons of vLLM's guide to speculative decoding, with a line more.

    Drafts are switched on, since by default this machine's measurement decides.
    """
    num_spec_tokens = 3
    llm = LLM(
        model=MODEL,
        trust_remote_code=False,
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        enforce_eager=True,
        gpu_memory_utilization=0.9,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": num_spec_tokens,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        disable_log_stats=False,
        max_model_len=256,
    )
    llm.set_speculation(mode="on")
    sampling_params = SamplingParams(temperature=0, max_tokens=64)
    prompts = ["1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"] * 2
    outputs = llm.generate(prompts, sampling_params=sampling_params)
    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
    assert 0 < num_drafts <= num_draft_tokens <= num_drafts * num_spec_tokens
    assert num_accepted_tokens == sum(acceptance_counts) > 0
    assert 1 + num_accepted_tokens / num_drafts > 1.5, "it repeats itself, and was not drafted"
    assert num_accepted_tokens == sum(each.speculation.num_accepted_tokens for each in outputs)
    llm.shutdown()


def blocks(page):
    """The programs on a page."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    return [code for code in found if "from specdec import" in code]


PROGRAMS = [*blocks("docs/python.md"), *blocks("README.md")]


@pytest.mark.parametrize("code", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_of_the_documentation_run(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_documentation_has_programs():
    assert len(blocks("docs/python.md")) == 5
    assert len(blocks("README.md")) == 1
