"""Generates on request, for benchmarks.precompiled; runs with any Python that has specdec.

    python benchmarks/precompiled_child.py MODEL TOKENS

Loads the model, prints a line of JSON with the kernels in use, and then for each line of standard
input generates and prints a line with the seconds and the token ids. Needs nothing of benchmarks.
"""

import json
import sys
import time

from specdec import LLM, SamplingParams
from specdec.kernels.cpu import native_library

PROMPTS = ["The capital of France is", "Once upon a time", "To sort a list", "Water boils at"]


def main(model: str, max_tokens: int) -> None:
    """Load the model and generate for each line of standard input."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(model) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        library = native_library()
        report({"library": None if library is None else library._name})
        for _ in sys.stdin:
            started_at = time.perf_counter()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            seconds = time.perf_counter() - started_at
            token_ids = [list(each.outputs[0].token_ids) for each in outputs]
            report({"seconds": seconds, "token_ids": token_ids})


def report(values: dict[str, object]) -> None:
    """Print one line of JSON."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
