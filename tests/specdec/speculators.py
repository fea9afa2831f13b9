"""Heads of tests in the layout of the speculators library, which names their target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def speculator_dir(head: Path, directory: Path, target: str, num_draft_tokens: int) -> Path:
    """Write an EAGLE-3 head in the layout of speculators.

    head: directory of one of `tests.specdec.heads`. target: name or path that the files give.
    num_draft_tokens: the draft length that they suggest.
    """
    fields = json.loads((head / "config.json").read_text())
    config = {
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": fields.pop("eagle_aux_hidden_state_layer_ids"),
        "draft_vocab_size": fields["draft_vocab_size"],
        "transformer_layer_config": fields,
        "speculators_config": {
            "verifier": {"name_or_path": target},
            "proposal_methods": [{"speculative_tokens": num_draft_tokens}],
        },
    }
    shutil.copytree(head, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
