"""Run the test suites of vLLM and SGLang against the service, and compare with expected.yaml.

`python -m tests.peers [vllm] [sglang]`; exits with 1 where a result differs from the table. With
PEER_URL set, the service at that address is tested, and none is started. For repeatable
results, the model decodes greedily and up to a limit by default, and the service has a seed and
drafts at every load: what it measures would decide otherwise.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.models.resolve import resolve
from tests.e2e.conftest import ALWAYS_DRAFT, running_service
from tests.peers.suites import Suite, suites

MODEL = "smollm2-135m-instruct"
DEFAULTS = {"temperature": 0, "max_new_tokens": 512}
FLAGS = ["--served-model-name", MODEL, "--max-model-len", "8192", *ALWAYS_DRAFT]
FLAGS += ["--seed", "0", "--enable-tokenizer-info-endpoint"]
HOME = Path(__file__).parents[2] / ".make" / "peers"


def main(names: list[str]) -> int:
    chosen = [each for each in suites(HOME) if each.name in (names or each.name)]
    for suite in chosen:
        suite.fetch()
    differences = [line for suite in chosen for line in run(suite)]
    print(*differences, f"{len(differences)} differences from expected.yaml", sep="\n")
    return 1 if differences else 0


def run(suite: Suite) -> list[str]:
    """Print the counts of a suite; return a line for each result that the table does not have."""
    with service() as url:
        results = suite.run(url, MODEL, resolve(MODEL))
    num_passed = sum(each.is_passed for each in results.values())
    print(f"{suite.name} {suite.version}: {len(results)} tests, {num_passed} passed")
    return suite.differences(results)


@contextmanager
def service() -> Iterator[str]:
    """Yield the address of PEER_URL, or of a service that ends with the block."""
    if url := os.environ.get("PEER_URL"):
        yield url
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link_model(folder / "model")
        with running_service(folder / "model", folder / "log", *FLAGS) as running:
            yield running.http_url


def link_model(folder: Path) -> None:
    """Link the files of the model to a new `folder`, with DEFAULTS as its sampling parameters."""
    folder.mkdir()
    for path in resolve(MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    generation = folder / "generation_config.json"
    defaults = {**json.loads(generation.read_text()), **DEFAULTS}
    generation.unlink()
    generation.write_text(json.dumps(defaults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
