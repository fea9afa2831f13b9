"""The benchmark of adapters runs its cases on the tiny model."""

import json
import random
import time

import pytest
import torch

from benchmarks.lora import (
    CASES,
    HEAD_CASES,
    PLAIN,
    LoraBench,
    bars,
    measure,
    print_table,
    summarize,
)
from benchmarks.precisions import PRECISIONS
from benchmarks.random_adapters import write_adapter, write_eagle3_adapter
from benchmarks.random_heads import write_eagle3
from specdec.kernels.cpu import native_library
from specdec.models.config.model_config import ModelConfig


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_cases_run_with_their_adapters(tiny_model_dir, tmp_path, capsys):
    config = ModelConfig.from_directory(tiny_model_dir)
    adapters = [write_adapter(tmp_path / str(i), config, 16, i) for i in range(16)]
    torch.manual_seed(5)
    head = write_eagle3(tmp_path / "head", config)
    values = json.loads((head / "config.json").read_text())
    values["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]  # the model has two layers
    (head / "config.json").write_text(json.dumps(values))
    of_head = [write_eagle3_adapter(tmp_path / f"h{i}", config, 16, i) for i in range(16)]
    bench = LoraBench(tiny_model_dir, adapters, PRECISIONS["fp32"], head, of_head)
    with torch.inference_mode():
        steps = bench.cases()
        logits = {name: step() for name, step in steps.items()}
        for name, adapter_ids in CASES.items():
            differs = (logits[name] != logits[PLAIN]).any(1).tolist()
            assert differs == [each > 0 for each in adapter_ids]
        plain, adapted = (logits[name] for name in HEAD_CASES)
        assert [len(each) for each in plain] == [4] * 16
        assert sum(own != other for own, other in zip(plain, adapted, strict=True)) > 8
        timed = {}
        measure(steps, 2, time.perf_counter, random.Random(0), timed)
    rows = summarize("fp32", timed)
    assert [row.case for row in rows] == [*CASES, *HEAD_CASES]
    assert rows[0].share == rows[-2].share == 1
    print_table(rows)
    assert "at most 112 %" in capsys.readouterr().out
    bar, of_head = bars(rows)
    assert of_head.limit == 1.15
    assert (bar.name, bar.limit) == ("1 adapter of rank 16 / no adapter, fp32", 1.12)
