"""Measures the drafters of an alias in a process, whose memory and threads end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from specdec.config.llm import LLMConfig
from specdec.config.model_aliases import ShippedDrafter
from specdec.llm.drafter_speeds import Acceptance, DrafterSpeeds, speeds_from
from specdec.models.hub import Progress
from specdec.types.errors import SpecdecError

MEASURED_SETTINGS = ("model", "dtype", "quantization", "device", "kernels")
"""The settings that change the seconds of a step, beside drafter and machine."""

LOADED = "specdec: models and kernels are loaded"
"""The line of standard output that ends loading, after which the time of the measurement counts."""

_LOADING_TIMEOUT_S = 1800.0
"""The first start compiles the C++ kernels, which takes minutes on a busy machine."""
_TIMEOUT_S = 60.0
"""A busy machine needs a multiple of the ten seconds that an idle one needs."""
_REMINDER_S = 7.0
"""Before the reminder of a service that starts, which the line replaces."""

MeasureSpeeds = Callable[[LLMConfig, Sequence[ShippedDrafter], Acceptance, Progress], DrafterSpeeds]
"""Measures the speeds of drafters with these cards on this machine. Raises TrialError."""


class TrialError(SpecdecError):
    """The speeds of the drafters could not be measured."""


def measure_in_process(
    config: LLMConfig,
    drafters: Sequence[ShippedDrafter],
    acceptance: Acceptance,
    progress: Progress,
) -> DrafterSpeeds:
    """Measure in a separate process, and report every seven seconds. See MeasureSpeeds."""
    order = {
        "config": {name: getattr(config, name) for name in MEASURED_SETTINGS},
        "drafters": {each.name: each.keys(config.device) for each in drafters},
        "acceptance": {name: [asdict(each) for each in card] for name, card in acceptance.items()},
    }
    try:
        output = _run(json.dumps(order), progress)
    except OSError as error:
        raise TrialError(f"the drafters could not be measured: {error}") from error
    try:
        # Libraries may write to standard output too; the last line is the result.
        result = json.loads(output.strip().rpartition("\n")[2])
        return speeds_from(result, drafters)
    except (ValueError, TypeError, AttributeError) as error:
        raise TrialError(f"the drafters could not be measured: {error!r}") from error


def _run(order: str, progress: Progress) -> str:
    """Return what `specdec.llm.drafter_trial` prints for an order."""
    # Modules are found as here, and not in the working directory.
    command = [sys.executable, "-P", "-m", "specdec.llm.drafter_trial"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True, process_group=0
    ) as process:
        try:
            output, errors = _communicate(process, order, progress)
        finally:
            with suppress(ProcessLookupError):  # it has ended, and the draft model's process
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        reason = (errors.strip().splitlines() or ["no message"])[-1]
        raise TrialError(f"the drafters could not be measured: {reason}")
    return output


def _communicate(process: subprocess.Popen[str], order: str, progress: Progress) -> tuple[str, str]:
    """Return standard output and standard error of a process once it has ended.

    Loading and measuring have a limit each; the second begins up to a reminder late.
    """
    given, is_loaded, started_at_s = order, False, time.monotonic()
    deadline_s = started_at_s + _LOADING_TIMEOUT_S
    while (now_s := time.monotonic()) < deadline_s:
        if (elapsed_s := now_s - started_at_s) >= _REMINDER_S:
            loading = "loading models, and loading or compiling kernels"
            progress(f"  still {'measuring' if is_loaded else loading}, {elapsed_s:.0f} s")
        try:
            return process.communicate(given, timeout=min(_REMINDER_S, deadline_s - now_s))
        except subprocess.TimeoutExpired as error:
            given = ""  # was given before
            if not is_loaded and LOADED.encode() in (error.output or b""):
                is_loaded, deadline_s = True, time.monotonic() + _TIMEOUT_S
    if is_loaded:
        raise TrialError(f"the drafters were not measured within {_TIMEOUT_S:g} s")
    raise TrialError(f"models and kernels were not loaded within {_LOADING_TIMEOUT_S:g} s")
