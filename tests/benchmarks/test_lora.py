"""The benchmark of adapters runs its cases on the tiny model."""

import random
import time

import pytest
import torch

from benchmarks.lora import CASES, PLAIN, LoraBench, bars, measure, print_table, summarize
from benchmarks.precisions import PRECISIONS
from benchmarks.random_adapters import write_adapter
from specdec.kernels.cpu import native_library
from specdec.models.config.model_config import ModelConfig


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_cases_run_with_their_adapters(tiny_model_dir, tmp_path, capsys):
    config = ModelConfig.from_directory(tiny_model_dir)
    adapters = [write_adapter(tmp_path / str(i), config, 16, i) for i in range(16)]
    bench = LoraBench(tiny_model_dir, adapters, PRECISIONS["fp32"])
    with torch.inference_mode():
        steps = bench.cases()
        logits = {name: step() for name, step in steps.items()}
        for name, adapter_ids in CASES.items():
            differs = (logits[name] != logits[PLAIN]).any(1).tolist()
            assert differs == [each > 0 for each in adapter_ids]
        timed = {}
        measure(steps, 2, time.perf_counter, random.Random(0), timed)
    rows = summarize("fp32", timed)
    assert [row.case for row in rows] == list(CASES)
    assert rows[0].share == 1
    print_table(rows)
    assert "at most 112 %" in capsys.readouterr().out
    [bar] = bars(rows)
    assert (bar.name, bar.limit) == ("1 adapter of rank 16 / no adapter, fp32", 1.12)
