"""The teacher's distributions are those of the precision that is served."""

import shutil

import pytest
import torch

from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.kernels.cpu import native_library
from specdec.training import objective
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import drafter_class
from specdec.training.objective import Objective
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.families import save_family

TOKENS = torch.arange(1, 320, 3)
BATCH = Batch.of([Sample((8, 6, 4, 2, 8, 6, 4, 2), num_prompt_tokens=2, temperature=0.0)])
PRECISIONS = [
    TargetPrecision(dtype, quantization, kernels)
    for kernels in ["torch"] + ["native"] * (native_library() is not None)
    for dtype in ("float32", "bfloat16")
    for quantization in (None, *CPU_QUANTIZATION_METHODS)
    if (kernels, quantization) != ("torch", "w8a8")
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_rows_of_the_output_head_give_the_served_logits(precision, target):
    served = Target(target.directory, 128, precision)
    hidden = served.hidden_states(BATCH, ())
    rows = served.output_rows(TOKENS)
    whole = served.decoder.compute_logits(hidden.final.to(rows.dtype)).float()
    assert rows.logits(hidden.final).dtype == torch.float32
    # The native kernels sum each output in one order; torch's depends on the number of outputs.
    tolerance = (
        0 if precision.kernels == "native" else 2e-2 if rows.dtype != torch.float32 else 1e-5
    )
    torch.testing.assert_close(
        rows.logits(hidden.final), whole[:, TOKENS], rtol=tolerance, atol=tolerance
    )


def test_an_int8_target_teaches_by_its_int8_output_head(target, monkeypatch):
    served = Target(target.directory, 128, TargetPrecision(quantization="int8", kernels="torch"))
    config, seen = TrainingConfig(depth=1, loss="kl"), []

    def loss(log_q, teacher):
        seen.append(teacher.p[0])
        return log_q.mean(-1)

    monkeypatch.setattr(objective, "LOSSES", {"kl": loss})
    drafter = drafter_class("eagle3")(served, TOKENS, config)
    hidden = served.hidden_states(BATCH, drafter.taps)
    Objective(config, served, TOKENS).backward(drafter, BATCH, hidden)
    final = hidden.final[BATCH.bases]
    of_int8 = served.decoder.compute_logits(final)[:, TOKENS].softmax(-1)
    of_float32 = (final @ served.lm_head[TOKENS].T).softmax(-1)
    torch.testing.assert_close(seen[0], of_int8, rtol=1e-4, atol=1e-6)
    assert (seen[0] - of_float32).abs().max() > 1e-4


def test_a_target_with_recurrent_layers_is_refused(tmp_path):
    save_family(tmp_path, "lfm2")
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM: no drafter is trained"):
        Target(tmp_path, 128, TargetPrecision("float32", None, "torch"))


def test_files_of_all_tokenizers_and_templates_are_those_of_the_text(target, tmp_path):
    directory = shutil.copytree(target.directory, tmp_path / "copy")
    names = {"tiktoken.model", "tokenizer.model", "chat_template.jinja", "chat_template.json"}
    for name in (*names, "training_args.json"):
        (directory / name).write_text("{}")
    served = Target(directory, 128, TargetPrecision(kernels="torch"))
    assert {*served.text_files} - {*target.text_files} == names
