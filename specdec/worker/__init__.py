"""One rank of a model.

Builds a flat batch from a step message, runs the model, samples and verifies, or drafts. It knows a
sequence only by step messages. The processes around ranks belong in `cluster.workers`.
"""

from specdec.distributed.rendezvous import Rendezvous
from specdec.kernels.cpu import native_library_fault
from specdec.worker.base import Runner
from specdec.worker.draft_worker import DraftRunner
from specdec.worker.loading import load_draft_runner, load_runner, load_warm
from specdec.worker.local import LocalDraftWorker, LocalTarget
from specdec.worker.profiler import StepProfiler
from specdec.worker.target_worker import ModelRunner

__all__ = [
    "DraftRunner",
    "LocalDraftWorker",
    "LocalTarget",
    "ModelRunner",
    "Rendezvous",
    "Runner",
    "StepProfiler",
    "load_draft_runner",
    "load_runner",
    "load_warm",
    "native_library_fault",
]
