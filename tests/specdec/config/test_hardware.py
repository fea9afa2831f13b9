"""What `auto` stands for."""

import pytest

from specdec.config.hardware import resolved_device


@pytest.mark.parametrize(
    ("has_driver", "finds_gpu", "device"),
    [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")],
)
def test_auto_takes_a_gpu_where_torch_finds_one(
    monkeypatch, tmp_path, has_driver, finds_gpu, device
):
    driver = tmp_path if has_driver else tmp_path / "missing"
    monkeypatch.setattr("specdec.config.hardware._GPU_DRIVERS", (driver,))
    monkeypatch.setattr("torch.cuda.is_available", lambda: finds_gpu)
    assert resolved_device("auto") == device
    assert resolved_device("cpu") == "cpu"
