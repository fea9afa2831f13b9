"""One rank of a model.

A model runner builds a flat batch from a step message, runs the model, then samples and verifies,
or drafts. Its state of a sequence comes from step messages only. The processes around ranks belong
in `cluster.workers`.
"""

from specdec.kernels.cpu import native_library_fault
from specdec.kernels.tensor_parallel import Rendezvous
from specdec.worker.draft_model_runner import DraftModelRunner
from specdec.worker.loading import (
    HeadFiles,
    RankModel,
    load_draft,
    load_served_head,
    load_target,
    load_warm,
)
from specdec.worker.local import LocalDraftWorker, LocalTarget
from specdec.worker.model_runner import LoadedModel, ModelRunner
from specdec.worker.profiler import StepProfiler
from specdec.worker.rank_comparison import RankComparison, RankMismatchError
from specdec.worker.target_model_runner import TargetModelRunner

__all__ = [
    "DraftModelRunner",
    "HeadFiles",
    "LoadedModel",
    "LocalDraftWorker",
    "LocalTarget",
    "ModelRunner",
    "RankComparison",
    "RankMismatchError",
    "RankModel",
    "Rendezvous",
    "StepProfiler",
    "TargetModelRunner",
    "load_draft",
    "load_served_head",
    "load_target",
    "load_warm",
    "native_library_fault",
]
