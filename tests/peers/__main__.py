"""Run the test suites of vLLM and SGLang against the service, and compare with expected.yaml.

`python -m tests.peers [vllm] [sglang]`; exits with 1 where a result differs from the table. With
PEER_URL set, the service at that address is tested, and none is started.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.models.resolve import resolve
from tests.e2e.conftest import running_service
from tests.peers.suites import Suite, suites

MODEL = "smollm2-135m-instruct"
HOME = Path(__file__).parents[2] / ".make" / "peers"


def main(names: list[str]) -> int:
    chosen = [each for each in suites(HOME) if each.name in (names or each.name)]
    for suite in chosen:
        suite.fetch()
    with service() as url:
        differences = [line for suite in chosen for line in run(suite, url)]
    print(*differences, f"{len(differences)} differences from expected.yaml", sep="\n")
    return 1 if differences else 0


def run(suite: Suite, url: str) -> list[str]:
    """Print the counts of a suite; return a line for each result that the table does not have."""
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
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", MODEL, "--max-model-len", "8192"]
        with running_service(None, Path(folder) / "log", *flags) as running:
            yield running.http_url


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
