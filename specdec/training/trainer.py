"""The training loop: steps, evaluations of the held-out acceptance length, and checkpoints."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.training.acceptance import Acceptance
from specdec.training.checkpoint import Checkpoint, CheckpointError
from specdec.training.data.batches import Batch, BatchOrder
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter, drafter_class
from specdec.training.export import export
from specdec.training.head_adapter import HeadAdapter
from specdec.training.losses import SAMPLED_LOSSES
from specdec.training.objective import Objective
from specdec.training.optimizers import Optimizers
from specdec.training.sampled_softmax import TokenSampler
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_choice

HEAD, ADAPTER = "head", "adapter"
"""Folders of a run with the exported drafter, or adapter: the best by held-out length."""
_LOSS_INTERVAL = {"cpu": 1, "cuda": 20}
"""Steps between two readings of losses by device: to read one is to wait for a GPU."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out acceptance after a number of steps, by temperature and by sample."""

    step: int
    acceptance: Mapping[float, Acceptance]
    by_sample: Sequence[Acceptance] = ()

    @property
    def mean_length(self) -> float:
        """Acceptance length of all steps: each sample counts, whatever its temperature."""
        return Acceptance.sum(self.acceptance.values()).mean_length

    def as_json(self) -> dict[str, Any]:
        """Return acceptance lengths, and acceptance by position, by temperature."""
        return {
            "step": self.step,
            "mean_accepted_length": round(self.mean_length, 4),
            "accepted_length": {
                str(temperature): round(each.mean_length, 4)
                for temperature, each in self.acceptance.items()
            },
            "acceptance_by_position": {
                str(temperature): [round(share, 4) for share in each.by_position]
                for temperature, each in self.acceptance.items()
            },
        }


@dataclass(frozen=True)
class Progress:
    """State of a run after a step.

    loss: mean of the latest steps that were read; NaN before the first.
    tokens_per_second: of prompts and answers, in training steps. evaluation: the latest, if there
    is one.
    """

    step: int
    num_steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    evaluation: Evaluation | None


class RecentLoss:
    """Exponential mean of the losses of steps, which are read from the device now and then."""

    def __init__(self, interval: int) -> None:
        """interval: steps between two readings."""
        self._interval = interval
        self._unread: list[Tensor] = []
        self.mean = math.nan

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step, []; read those so far if it is time to."""
        self._unread.append(loss)
        if math.isnan(self.mean) or len(self._unread) == self._interval:
            self.read()

    def read(self) -> None:
        """Read what is left; waits for the device."""
        for loss in torch.stack(self._unread).tolist() if self._unread else ():
            self.mean = loss if math.isnan(self.mean) else 0.95 * self.mean + 0.05 * loss
        self._unread = []


@dataclass(frozen=True)
class Data:
    """Samples to train on and to evaluate on, and the draft vocabulary.

    token_ids: the target's ids of the draft tokens, ascending. card: what the drafter's card
    reports of them. columns: of noise at evaluations, see Objective. is_sampled: whether the loss
    of a step is over the tokens of the training answers and some random others alone.
    """

    train: Sequence[Sample]
    held_out: Sequence[Sample]
    token_ids: Sequence[int]
    card: Mapping[str, Any]
    columns: Sequence[int] | None = None
    is_sampled: bool = False


class Trainer:
    """One run, which continues the checkpoint of its directory if there is one."""

    def __init__(
        self,
        config: TrainingConfig,
        target: Target,
        data: Data,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        start: ExportedHead | None = None,
        before: Evaluation | None = None,
    ) -> None:
        """Make the drafter.

        start: head whose weights it begins with, and which it must surpass to be exported; that of
        an adapter. before: evaluation of that head on these samples; None to evaluate it.

        Raises InvalidValueError for another run's directory, no held-out answer, or an unfit loss.
        """
        if not any(len(each.answer) > 1 for each in data.held_out):
            limit = "with an answer of two tokens or more among those held out"
            raise InvalidValueError("corpus", f"{len(data.held_out)} held-out samples", limit)
        self._config, self._target, self._data = config, target, data
        self._directory, self._clock = directory, clock
        token_ids = torch.tensor(list(data.token_ids), dtype=torch.int64)
        self.drafter, self._adapter = _new_drafter(config, target, token_ids, start)
        self._objective = Objective(config, target, token_ids, data.columns)
        self._sampler, self._optimizers = _sampler(config, data), Optimizers(config, self.drafter)
        self.order = BatchOrder(
            [len(each.token_ids) for each in data.train],
            num_epochs=config.num_epochs,
            batch_tokens=config.batch_tokens,
            seed=config.seed,
        )
        self.step = self._best_step = 0
        self.best = 0.0  # longest held-out acceptance length; 0 before the first evaluation
        self._evaluation: Evaluation | None = None
        self._start_digest = start.digest if start is not None else None
        self.best_evaluation: Evaluation | None = None  # none since the checkpoint was loaded
        if not self._load() and start is not None:
            self._evaluation = self.best_evaluation = before or self.evaluate()
            self.best = self._evaluation.mean_length

    @property
    def num_steps(self) -> int:
        return len(self.order)

    @property
    def head_directory(self) -> Path:
        """The folder with the exported drafter, or its adapter."""
        return self._directory / (HEAD if self._adapter is None else ADAPTER)

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train up to the last step, or until the held-out acceptance length stops growing.

        report: called after each step.
        """
        started, first, num_tokens = self._clock(), self.step, 0
        paused, loss = 0.0, RecentLoss(_LOSS_INTERVAL[self._target.device.type])
        while not self._is_complete:
            batch = self._batch(self.step)
            loss.add(self._train(batch))
            num_tokens += batch.num_tokens
            if self.step % self._config.evaluate_every == 0 or self.step == self.num_steps:
                loss.read()
                before = self._clock()
                self._evaluate()
                paused += self._clock() - before
            if self.step % self._config.checkpoint_every == 0 or self._is_complete:
                self._save()
            elapsed = self._clock() - started - paused
            left = (self.num_steps - self.step) * elapsed / (self.step - first)
            rate = num_tokens / max(elapsed, 1e-9)
            report(Progress(self.step, self.num_steps, loss.mean, rate, left, self._evaluation))

    @property
    def _is_complete(self) -> bool:
        steps = self._config.patience * self._config.evaluate_every
        is_stalled = self.step - self._best_step >= steps
        return is_stalled or self.step == self.num_steps

    def _batch(self, step: int) -> Batch:
        """Return the samples of a step, and the bases that it trains."""
        generator = np.random.default_rng((self._config.seed, step))
        batch = Batch.of([self._data.train[index] for index in self.order[step]])
        return batch.with_bases(self._config.max_anchors, generator)

    def _train(self, batch: Batch) -> Tensor:
        """Train a batch on the host; return its loss, [] on the target's device."""
        hidden = self._target.hidden_states(batch, self.drafter.taps)
        on_device = batch.to(self._target.device)
        tokens = None
        if self._sampler is not None:
            generator = np.random.default_rng((self._config.seed, self.step, 1))
            tokens = self._sampler.draw(generator, self._target.device)
        loss = self._objective.backward(self.drafter, on_device, hidden, tokens)
        self._optimizers.step(self.step, self.num_steps)
        self.step += 1
        return loss

    def evaluate(self) -> Evaluation:
        """Return the acceptance on the held-out samples."""
        device, depth = self._target.device, self._config.depth
        generator = torch.Generator(device).manual_seed(self._config.seed)
        found = dict[float, list[Acceptance]]()  # the samples are sorted by temperature
        for samples in self._held_out_batches:
            batch = Batch.of(samples)
            hidden = self._target.hidden_states(batch, self.drafter.taps)
            on_device = batch.to(device)
            drafts = self._objective.drafts(self.drafter, on_device, hidden, generator)
            assert len(drafts) == depth, f"the drafter drafted {len(drafts)} tokens (depth {depth})"
            own = Acceptance.by_sample(on_device, drafts)
            found.setdefault(samples[0].temperature, []).extend(own)
        sums = {temperature: Acceptance.sum(each) for temperature, each in found.items()}
        return Evaluation(self.step, sums, list(chain.from_iterable(found.values())))

    @cached_property
    def _held_out_batches(self) -> list[list[Sample]]:
        """The held-out samples with a base, in batches of one temperature.

        They have up to `batch_tokens` tokens on a GPU, and one sample each on a CPU, which gains
        nothing by larger ones.
        """
        batches, num_tokens = list[list[Sample]](), 0
        limit = self._config.batch_tokens if self._target.device.type == "cuda" else 0
        for sample in sorted(self._data.held_out, key=lambda each: each.temperature):
            if len(sample.answer) < 2:
                continue
            last = batches[-1] if batches else []
            num_tokens += len(sample.token_ids)
            if last and last[0].temperature == sample.temperature and num_tokens <= limit:
                last.append(sample)
            else:
                batches.append([sample])
                num_tokens = len(sample.token_ids)
        return batches

    def _evaluate(self) -> None:
        """Evaluate, and export the drafter if it is the best so far."""
        self._evaluation = self.evaluate()
        if self._evaluation.mean_length > self.best:
            self.best_evaluation = self._evaluation
            self.best, self._best_step = self._evaluation.mean_length, self.step
            self.export()

    def export(self) -> None:
        """Write the drafter of the present step, or its adapter, to `head_directory`."""
        evaluation = self._evaluation.as_json() if self._evaluation else None
        run = {"step": self.step, "num_steps": self.num_steps, **asdict(self._config)}
        card = {**self._data.card, "training": run, "held_out": evaluation}
        dtype, layout = self._config.export_dtype, self._config.export_layout
        if self._adapter is not None:
            self._adapter.export(self.head_directory, dtype, card)
        else:
            export(self.drafter, self.head_directory, dtype, card, layout)

    @cached_property
    def _run_id(self) -> dict[str, Any]:
        """Return what a checkpoint must have in common with the run that continues it."""
        digest = hashlib.sha256()
        for sample in (*self._data.train, *self._data.held_out):
            digest.update(repr((sample.token_ids, sample.num_prompt_tokens)).encode())
        digest.update(repr(list(self._data.token_ids)).encode())
        target = {f"target_{name}": each for name, each in asdict(self._target.precision).items()}
        run = {**asdict(self._config), **target, "data": digest.hexdigest()}
        if self._data.is_sampled:
            run |= {"is_sampled": True}
        if self._target.adapter_hash:
            run |= {"adapter": self._target.adapter_hash}
        return run if self._start_digest is None else run | {"start": self._start_digest}

    def _save(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        progress = {"best": self.best, "best_step": self._best_step}
        weights, optimizer = dict(self.drafter.state_dict()), self._optimizers.tensors()
        Checkpoint(self.step, self._run_id, progress, weights, optimizer).save(self._directory)

    def _load(self) -> bool:
        """Continue the checkpoint of the directory; return whether there is one."""
        checkpoint = Checkpoint.load(self._directory)
        if checkpoint is None:
            return False
        for name in checkpoint.run.keys() | self._run_id.keys():
            existing = checkpoint.run.get(name)
            if self._run_id.get(name) != existing:
                limit = f"{existing!r}, as in the checkpoint in {self._directory}"
                raise InvalidValueError(name, self._run_id.get(name), limit)
        if checkpoint.weights.keys() != self.drafter.state_dict().keys():
            raise CheckpointError(
                f"the checkpoint in {self._directory} has parameters of another version; delete it "
                "to begin the run again"
            )
        self.drafter.load_state_dict(checkpoint.weights)
        self._optimizers.load(checkpoint.optimizer)
        self.step = checkpoint.step
        self.best = float(checkpoint.progress["best"])
        self._best_step = int(checkpoint.progress["best_step"])
        return True


def _sampler(config: TrainingConfig, data: Data) -> TokenSampler | None:
    if not data.is_sampled:
        return None
    require_choice("loss", config.loss, SAMPLED_LOSSES)
    require_choice("position_weights", config.position_weights, ("decay",))
    answered = {token_id for sample in data.train for token_id in sample.answer}
    return TokenSampler(data.token_ids, sorted(answered))


def _new_drafter(
    config: TrainingConfig, target: Target, token_ids: Tensor, start: ExportedHead | None
) -> tuple[Drafter, HeadAdapter | None]:
    """Return a drafter with the weights of `start`, if given, and the adapter that is trained."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        drafter = drafter_class(config.method)(target, token_ids, config).to(target.device)
        if start is not None:
            start.copy_to(drafter)
        if config.lora_rank is None:
            return drafter, None
        assert start is not None, "an adapter of no head"
        return drafter, HeadAdapter(drafter, start, config.lora_rank)
