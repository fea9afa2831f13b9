"""The identity of weights."""

import os
import shutil

from specdec.models.weights.fingerprint import weights_fingerprint


def test_only_weights_count(tiny_model_dir, tmp_path):
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    (copy / "config.json").write_text("{}")
    same = weights_fingerprint(copy)
    assert same == weights_fingerprint(tiny_model_dir)
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 1))  # a file system may have a coarse clock
    assert weights_fingerprint(copy) != same
