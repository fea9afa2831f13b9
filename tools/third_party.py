"""Downloads the dashboard's third-party files from npm, and verifies their digests.

    python -m tools.third_party check
    python -m tools.third_party update [VERSION]

`update` needs npm. It downloads the package at the given version, by default the one in
third_party/versions.json; npm verifies the archive against the registry's digest. The files are
copied unchanged, and their SHA-256 digests are recorded; `check` compares the digests.
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
    """Return the files of `folder` that are missing, unknown or different from their digests."""
    versions = json.loads((folder / "versions.json").read_text())
    changed = []
    for package, metadata in versions.items():
        recorded = metadata["sha256"]
        present = {path.name: _digest(path) for path in (folder / package).iterdir()}
        names = present.keys() | recorded.keys()
        changed += [
            f"{package}/{name}" for name in names if present.get(name) != recorded.get(name)
        ]
    return sorted(changed)


def update(folder: Path, version: str | None) -> None:
    """Replace the files by those of `version`, by default the current one.

    Raises CalledProcessError if npm fails.
    """
    versions = json.loads((folder / "versions.json").read_text())
    version = version or versions[PACKAGE]["version"]
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", "--json", f"{PACKAGE}@{version}"]
        output = subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE).stdout
        metadata = json.loads(output)[0]
        with tarfile.open(Path(directory) / metadata["filename"]) as archive:
            for name, source in FILES.items():
                member = archive.extractfile(source)
                assert member is not None, f"{source} is not a regular file"
                (folder / PACKAGE / name).write_bytes(member.read())
    digests = {name: _digest(folder / PACKAGE / name) for name in FILES}
    versions[PACKAGE] = {
        "version": metadata["version"],
        "license": "MIT",
        "homepage": "https://github.com/leeoniya/uPlot",
        "integrity": metadata["integrity"],
        "sha256": digests,
    }
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str]) -> int:
    """Update or check the files; return the exit status."""
    match arguments:
        case ["update", *version] if len(version) <= 1:
            update(FOLDER, version[0] if version else None)
        case ["check"]:
            pass
        case _:
            print(__doc__)
            return 2
    changed = changed_files(FOLDER)
    lines = [f"{path}: does not match its recorded digest" for path in changed]
    print("\n".join(lines) or "third_party: all digests match")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
