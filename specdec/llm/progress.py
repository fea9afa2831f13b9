"""The progress bar of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from specdec.llm.outputs import RequestOutput


class Progress:
    """Progress bar with the number of outputs and tokens per second, if enabled."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """use_tqdm: True for tqdm's bar; or a function that makes one, called like tqdm."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar: Any = None
        if use_tqdm:
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._began_at_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count a complete output."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        seconds = max(time.perf_counter() - self._began_at_s, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_prompt_tokens / seconds:.1f} tokens/s, "
            f"output {self._num_output_tokens / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
