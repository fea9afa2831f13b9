"""Tests that buf accepts compatible changes of the protos, and rejects incompatible ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUF = Path(sys.executable).parent / "buf"
INFERENCE = "protos/specdec/v1/inference.proto"

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="needs buf-bin: pip install -e '.[dev]'")


@pytest.fixture
def changed(tmp_path):
    """Return a function that applies a replacement to the protos, and returns buf's findings."""
    for name in ("protos", "buf.yaml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)

    def compare(old, new):
        path = tmp_path / INFERENCE
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        against = [str(BUF), "breaking", str(tmp_path), "--against", str(ROOT)]
        done = subprocess.run(against, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    return compare


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optional int32 max_tokens = 17;", "optional int32 max_tokens = 17;\n  bool later = 99;"),
        ("  // Names the request in", "  // Gives the request a name in"),
    ],
    ids=["another field", "another comment"],
)
def test_a_compatible_change_is_accepted(changed, old, new):
    assert changed(old, new) == ""


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("optional int32 max_tokens = 17;", "", "max_tokens"),
        ("optional int32 max_tokens = 17;", "optional int32 max_tokens = 99;", '"17"'),
        ("optional int32 max_tokens = 17;", "optional int64 max_tokens = 17;", "max_tokens"),
        ("optional int32 max_tokens = 17;", "optional int32 most_tokens = 17;", "most_tokens"),
        ("rpc Detokenize(DetokenizeRequest)", "rpc Detokenise(DetokenizeRequest)", "Detokenize"),
        ("VERIFIER_BLOCK = 3;", "VERIFIER_BLOCK = 99;", '"3"'),
    ],
    ids=["removed", "renumbered", "retyped", "renamed", "RPC renamed", "enum renumbered"],
)
def test_an_incompatible_change_is_rejected(changed, old, new, finding):
    assert finding in changed(old, new)
