"""Add a value of the enum SpeculationMethod to the protos for each drafting method without one.

python -m tools.wire_methods [check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from specdec.config.speculation.methods import METHODS
from tools.generated_files import run

PROTO = Path("protos/specdec/v1/inference.proto")
_ENUM = re.compile(r"(?<=enum SpeculationMethod \{\n).*?(?=\n\})", re.DOTALL)
_VALUE = re.compile(r"SPECULATION_METHOD_(\w+) = (\d+);")


def changed(text: str) -> str:
    """Return the file with values for new methods; those of others keep their numbers."""
    found = _ENUM.search(text)
    assert found is not None, f"{PROTO} has no enum SpeculationMethod"
    numbers = {name.lower(): int(number) for name, number in _VALUE.findall(found[0])}
    values = [found[0]]
    for name, method in METHODS.items():
        if name not in numbers:
            numbers[name] = max(numbers.values()) + 1
            comment = (method.__doc__ or "").partition("\n")[0]
            values.append(f"  // {comment}\n  SPECULATION_METHOD_{name.upper()} = {numbers[name]};")
    return text.replace(found[0], "\n\n".join(values))


if __name__ == "__main__":
    files = {PROTO: lambda: changed(PROTO.read_text(encoding="utf-8"))}
    sys.exit(run(files, __doc__, sys.argv[1:]))
