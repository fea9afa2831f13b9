"""Asynchronous drafting with the target on the GPU and the draft model in another process.

The draft model runs on the cores of the CPU, and then on the same GPU. The target has the layers of
a small random model and many that change nothing, so it has that model's tokens at the price of a
larger one; the draft model is the small one with noise in its weights, some of whose tokens are
rejected. One stream, sampled. The timeline shows what ran when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.drafting_engines import (
    LIMITS,
    MODES,
    NO_DRAFTER,
    SYNCHRONOUS,
    Engines,
    Models,
    Run,
    local_target,
)
from benchmarks.gpu.draft_process import DraftProcess
from benchmarks.gpu.parts import Context, Result
from benchmarks.tiny_model import write_deepened, write_disturbed, write_tiny_llama
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.draft_messages import AheadOutput, DraftStep
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.ranks import DraftWorker, Target
from specdec.worker import LocalTarget

_NUM_DRAFTS, _MAX_TOKENS, _TEMPERATURE = 4, 96, 0.8
_NUM_PROMPTS, _PROMPT_TOKENS = 6, 24
_NOISE = 0.1
"""Noise of the draft model's weights over their deviation: about three in four tokens are the
target's."""
_NUM_LAYERS, _FEW_LAYERS = 120, 4
_MOST_CORES = 4
"""Most cores of the draft model, whose passes are too small for more."""
_MOST_SPANS = 60
_LEAST_GAIN, _MAX_DIFFERING = 1.0, 1 / 6

Span = tuple[float, float]
"""Seconds of its begin and its end."""


@dataclass(frozen=True)
class Timeline:
    """When the target ran steps, and the draft model passes for drafts ahead."""

    target: list[Span]
    draft: list[Span]

    @property
    def overlap(self) -> float:
        """Part of the draft model's time in which the target ran."""
        busy_s = sum(end - begin for begin, end in self.draft)
        both_s = sum(
            max(0.0, min(ends) - max(begins))
            for begins, ends in (
                ((own[0], other[0]), (own[1], other[1]))
                for own in self.draft
                for other in self.target
            )
        )
        return both_s / busy_s if busy_s else 0.0

    def events(self, most: int) -> list[dict[str, object]]:
        """Return the first spans in the Trace Event Format of Chrome and Perfetto, by begin."""
        spans = [("target", *span) for span in self.target]
        spans += [("draft model", *span) for span in self.draft]
        spans.sort(key=lambda span: span[1])
        first_s = spans[0][1] if spans else 0.0
        return [
            {
                "name": name,
                "ph": "X",
                "ts": round((begin - first_s) * 1e6),
                "dur": round((end - begin) * 1e6),
                "pid": 0,
                "tid": name,
            }
            for name, begin, end in spans[:most]
        ]


class _TracedTarget:
    """A target whose steps are in a timeline, from their begin or the end of the one before."""

    def __init__(self, target: Target, timeline: Timeline) -> None:
        self._target = target
        self._spans = timeline.target
        self._begun_at_s: list[float] = []

    def begin(self, step: StepInput) -> None:
        """Send a step."""
        self._begun_at_s.append(time.perf_counter())
        self._target.begin(step)

    def collect(self) -> VerifyOutput:
        """Run the oldest step."""
        output = self._target.collect()
        last_s = self._spans[-1][1] if self._spans else 0.0
        self._spans.append((max(last_s, self._begun_at_s.pop(0)), time.perf_counter()))
        return output


class _TracedWorker:
    """A draft worker whose passes for drafts ahead are in a timeline, from the message on."""

    def __init__(self, worker: DraftWorker, timeline: Timeline) -> None:
        self._worker = worker
        self._spans = timeline.draft
        self._begun_at_s: dict[int, float] = {}
        self.collect, self.poll_busy = worker.collect, worker.poll_busy

    def begin(self, step: DraftStep) -> None:
        """Send a step."""
        if step.ahead:
            self._begun_at_s[step.step_id] = time.perf_counter()
        self._worker.begin(step)

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return drafts ahead, and record when they were made."""
        outputs = self._worker.collect_ahead(wait=wait)
        for output in outputs:
            begun_at_s = self._begun_at_s.pop(output.step_id)
            passes_s = sum(each.seconds for each in output.passes)
            self._spans.append((begun_at_s, begun_at_s + passes_s))
        return outputs


class _Runs(Engines):
    """Runs of each mode on a target and a draft model."""

    def __init__(self, directory: Path, target: LocalTarget, worker: DraftWorker) -> None:
        super().__init__(directory, _TEMPERATURE, time.perf_counter)
        self._target = target
        self._worker = worker

    def measure(self, mode: str, prompts: Sequence[tuple[int, ...]]) -> tuple[Result, list[object]]:
        """Return the figures of a mode, and the tokens after each prompt."""
        run, timeline = Run(mode, _NUM_DRAFTS), Timeline([], [])
        tokens: list[object] = []
        for prompt in prompts:
            target = _TracedTarget(self._target, timeline)
            worker = _TracedWorker(self._worker, timeline)
            tokens.append(self.run(run, Models(target, worker), prompt, _MAX_TOKENS))
        ahead = run.counts.ahead
        result: Result = {"tokens_per_s": run.median}
        if timeline.draft:
            result |= {
                "hit_rate": ahead.hit_rate,
                "draft_busy": ahead.busy_s / run.seconds,
                "overlap": timeline.overlap,
                "timeline": timeline.events(_MOST_SPANS),
            }
        return result, tokens


def compare_async_drafting(context: Context) -> Result:
    """Compare drafts made ahead with those that a step waits for, by the draft model's device."""
    own_directory = context.directory / "asynchronous"
    small = write_tiny_llama(own_directory / "small")
    draft_dir = write_disturbed(own_directory / "draft", small, _NOISE)
    num_layers = _FEW_LAYERS if context.is_small else _NUM_LAYERS
    directory = write_deepened(own_directory / "deep", small, num_layers)
    speculation = SpeculativeConfig.of("draft_model", _NUM_DRAFTS)
    target = local_target(directory, None, context.device, speculation)
    own, *others = sorted(os.sched_getaffinity(0))
    cores = tuple(others[:_MOST_CORES]) or (own,)
    result: Result = {"passed": True, "placements": {}, "aims": {}}
    for device in dict.fromkeys(("cpu", context.device.type)):
        worker = DraftProcess(draft_dir, LIMITS, device, cores)
        try:
            found, differing = _compare(_Runs(directory, target, worker), context)
        finally:
            worker.close()
        result["placements"][f"draft model on {device}"] = found
        result["passed"] &= differing <= _MAX_DIFFERING
        gain = max(found[mode]["tokens_per_s"] for mode in MODES[1:])
        gain /= found[SYNCHRONOUS]["tokens_per_s"]
        name = f"asynchronous over synchronous drafting, draft model on {device}"
        result["aims"][name] = {"value": gain, "at_least": _LEAST_GAIN}
        context.save(result)
    return result


def _compare(runs: _Runs, context: Context) -> tuple[Result, float]:
    """Return the figures of each mode, and the largest share of prompts with other tokens."""
    generator = torch.Generator().manual_seed(0)
    count = 1 if context.is_small else _NUM_PROMPTS
    size = (count, _PROMPT_TOKENS)
    prompts = [tuple(each) for each in torch.randint(2, 258, size, generator=generator).tolist()]
    modes = (NO_DRAFTER, *MODES)
    for mode in modes:
        runs.measure(mode, prompts[:1])  # warm
    found, tokens = {}, []
    for mode in modes:
        found[mode], own = runs.measure(mode, prompts)
        tokens.append(own)
    differing = max(
        sum(a != b for a, b in zip(tokens[0], other, strict=True)) / count for other in tokens[1:]
    )
    return {**found, "differing": differing}, differing
