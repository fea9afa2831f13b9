"""An alias for the tiny model, with drafters whose cards have a known acceptance."""

import json
from dataclasses import replace

from specdec.config.hardware import LoadOfOthers
from specdec.config.model_aliases import ALIASES, ShippedDrafter
from specdec.engine.models import preflight
from specdec.llm import drafter_choice
from specdec.llm.drafter_speeds import DrafterSpeeds
from specdec.models.weights.fingerprint import weights_fingerprint

DRAFTERS = (
    ShippedDrafter("tiny-lookup", "suffix", 2, has_weights=False),
    ShippedDrafter("tiny-ngram", "ngram", 2, has_weights=False),
)
"""The second one is accepted more often."""
HEAD = ShippedDrafter("tiny-head", "medusa", 2)
"""It is never accepted."""


def shipped_aliases(model_dir, directory, monkeypatch, drafters=DRAFTERS):
    """Let `tiny` be an alias of a model with drafters; return the aliases, which may be changed."""
    source = replace(
        ALIASES["smollm2-135m-instruct"],
        drafters=drafters,
        weights_sha256=weights_fingerprint(model_dir),
    )
    aliases = {"tiny": source}
    for name in ("specdec.config.model_aliases", "specdec.llm.drafter_choice"):
        monkeypatch.setattr(f"{name}.ALIASES", aliases)
    for module in (drafter_choice, preflight):
        monkeypatch.setattr(module, "resolve", lambda name, progress: model_dir)
    monkeypatch.setattr(drafter_choice, "drafter_directory", lambda name: directory / name)
    monkeypatch.setattr(LoadOfOthers, "share", lambda self: 0.0)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(directory / "cache"))
    for drafter, accepted in zip(drafters, ([8, 4], [60, 40], [0, 0]), strict=False):
        result = {"num_steps": 80, "num_drafts": 80, "num_accepted": accepted}
        card = {"evaluation": {"results": [{"suite": "a", "temperature": 0.0, **result}]}}
        (directory / drafter.name).mkdir()
        (directory / drafter.name / "card.json").write_text(json.dumps(card))
    return aliases


def measured_speeds(config, drafters, acceptance, progress):
    """Return speeds of five equal rounds: 1.1, 1.2 and so on."""
    gains = {each.name: ((11 + index) / 10,) * 5 for index, each in enumerate(drafters)}
    return DrafterSpeeds((100.0,) * 5, gains)
