"""A run that is killed at random moments ends with the weights of an undisturbed one."""

import multiprocessing
import random
import time

import pytest
import torch
from safetensors.torch import load_file

from specdec.training.data.config import TrainingConfig
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.trainer import HEAD, Data, Trainer

CONFIG = TrainingConfig(
    depth=3, num_epochs=8, batch_tokens=64, evaluate_every=10, checkpoint_every=3
)


def train(target_directory, samples, output):
    torch.set_num_threads(1)  # as in this process: sums depend on the number of threads
    target = Target(target_directory, 128, TargetPrecision(kernels="torch"))
    data = Data(samples[4:], samples[:4], range(target.config.vocab_size), {})
    Trainer(CONFIG, target, data, output).run(lambda _: None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_kills_change_no_bit(target, samples, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(target.directory, samples, whole)
    draw, context = random.Random(time.time_ns()), multiprocessing.get_context("spawn")
    num_kills = 0
    while num_kills < 5:
        process = context.Process(target=train, args=(target.directory, samples, killed))
        process.start()
        checkpoint = killed / "checkpoint.safetensors"
        stamp = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        # At first wait for progress, so that the kills fall into training and not into imports.
        while process.is_alive() and (
            not checkpoint.exists() or checkpoint.stat().st_mtime_ns == stamp
        ):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        assert process.is_alive(), "the run ended before five kills: it needs more steps"
        process.kill()
        process.join()
        num_kills += 1
    train(target.directory, samples, killed)
    for name in ("checkpoint.safetensors", f"{HEAD}/model.safetensors"):
        left, right = load_file(whole / name), load_file(killed / name)
        assert left.keys() == right.keys()
        assert all(left[key].equal(right[key]) for key in left), name
    for name in ("config.json", "card.json"):
        assert (whole / HEAD / name).read_text() == (killed / HEAD / name).read_text()
