"""A small target that was trained on a text, and samples of what it writes."""

from dataclasses import replace

import torch
from filelock import FileLock
from transformers import LlamaForCausalLM

from specdec.config.speculation.methods import trained_drafters
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import drafter_class
from specdec.training.trainer import Data, Trainer
from tests.specdec.tiny import TEXT
from tests.specdec.trained import byte_level, trained_llama_dir

NUM_PROMPTS = 24
CONFIG = TrainingConfig(
    depth=3, num_epochs=2, batch_tokens=128, held_out=0.2, evaluate_every=4, export_dtype="float32"
)


def exported(method, target, directory, samples, num_epochs=1):
    """Train a head briefly and return its trainer."""
    has_layers = "num_layers" in trained_drafters()[method].sizes
    config = replace(
        CONFIG, method=method, num_epochs=num_epochs, num_layers=1 if has_layers else None
    )
    size = target.config.vocab_size
    ids = range(0, size, 2) if drafter_class(method).has_reduced_vocabulary else range(size)
    trainer = Trainer(config, target, Data(samples[4:], samples[:4], list(ids), {}), directory)
    trainer.run(lambda progress: None)
    trainer.export()
    return trainer


def small_target(directory):
    """Load the target from a directory, into which the first process trains it."""
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            new = directory.with_suffix(".new")
            trained_llama_dir(new, byte_level(TEXT, 320), TEXT, num_steps=150).rename(directory)
    return Target(directory, 128, TargetPrecision(kernels="torch"))


def written_samples(target, count=NUM_PROMPTS, num_new=24):
    """Return the target's own texts after pieces of TEXT, half greedy, half at temperature 0.8."""
    tokenizer = byte_level(TEXT, 320)
    model = LlamaForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()
    token_ids = torch.tensor(tokenizer.encode(TEXT, add_special_tokens=False))
    starts = torch.linspace(0, len(token_ids) - 12, count).long().tolist()
    prompts = torch.stack([token_ids[start : start + 6] for start in starts])
    samples = []
    for index, temperature in enumerate((0.0, 0.8)):
        torch.manual_seed(index)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        own = prompts[index::2]
        texts = model.generate(
            own,
            attention_mask=torch.ones_like(own),
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            pad_token_id=0,
            **sampling,
        )
        samples += [Sample(tuple(text), own.shape[1], temperature) for text in texts.tolist()]
    return samples
