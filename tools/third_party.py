"""Fetches what the dashboard takes from npm, and checks that nobody has changed it since.

    python -m tools.third_party check
    python -m tools.third_party update [VERSION]

`update` needs npm. A package is fetched at the version in third_party/versions.json, or at the one
that is given, and npm holds its archive against the registry's digest. Its files are copied as they
are, and their digests are written down; `check` compares them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path("cluster/api/dashboard/static/third_party")
PACKAGE = "uplot"
FILES = {
    "uPlot.iife.min.js": "package/dist/uPlot.iife.min.js",
    "uPlot.min.css": "package/dist/uPlot.min.css",
    "LICENSE": "package/LICENSE",
}


def changed_files(folder: Path) -> list[str]:
    """The files of `folder` that are missing, unknown, or not as they were fetched."""
    known = json.loads((folder / "versions.json").read_text())
    wrong = []
    for package, told in known.items():
        present = {path.name: _digest(path) for path in (folder / package).iterdir()}
        names = present.keys() | told["sha256"].keys()
        wrong += [
            f"{package}/{name}" for name in names if present.get(name) != told["sha256"].get(name)
        ]
    return sorted(wrong)


def update(folder: Path, version: str | None) -> None:
    """Replaces the files by those of another version, or of the same. Raises what npm raises."""
    known = json.loads((folder / "versions.json").read_text())
    version = version or known[PACKAGE]["version"]
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", "--json", f"{PACKAGE}@{version}"]
        told = json.loads(
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE).stdout
        )[0]
        with tarfile.open(Path(directory) / told["filename"]) as archive:
            for name, source in FILES.items():
                member = archive.extractfile(source)
                assert member is not None, f"{source} is no file"
                (folder / PACKAGE / name).write_bytes(member.read())
    digests = {name: _digest(folder / PACKAGE / name) for name in FILES}
    known[PACKAGE] = {
        "version": told["version"],
        "license": "MIT",
        "homepage": "https://github.com/leeoniya/uPlot",
        "integrity": told["integrity"],
        "sha256": digests,
    }
    (folder / "versions.json").write_text(json.dumps(known, indent=2) + "\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str]) -> int:
    """Exit status 1 where a file is not as it was fetched."""
    match arguments:
        case ["update", *version] if len(version) <= 1:
            update(FOLDER, version[0] if version else None)
        case ["check"]:
            pass
        case _:
            print(__doc__)
            return 2
    wrong = changed_files(FOLDER)
    print("\n".join(f"{path}: not as it was fetched" for path in wrong) or "third_party is intact")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
