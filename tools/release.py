"""Checks and files of a release, for `.github/workflows/release.yml`. Standard library only.

python -m tools.release check TAG: compare the tag with the versions of package, chart and changelog
python -m tools.release notes TAG: print the section of the changelog
python -m tools.release chart IMAGE FOLDER: copy the chart into FOLDER, with IMAGE as the default
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = Path("k8s", "specdec")

_TAG = re.compile(r"v(\d+\.\d+\.\d+)")
_SECTION = re.compile(r"^## (?P<version>\S+), (?P<date>\S+)\n(?P<text>.*?)(?=^## |\Z)", re.M | re.S)
_REPOSITORY = re.compile(r"^(image:\n(?:  .*\n)*?  repository: )\S+$", re.M)


class ReleaseError(ValueError):
    """A tag that cannot be released, or a file without the expected content."""


def check(tag: str, root: Path = ROOT) -> None:
    """Raise ReleaseError unless package, chart and changelog have the version of the tag."""
    version = _version_of(tag)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    chart = (root / CHART / "Chart.yaml").read_text()
    found = {"pyproject.toml": project}
    for field in ("version", "appVersion"):
        match = re.search(rf"^{field}: (\S+)$", chart, re.M)
        found[f"{field} of Chart.yaml"] = match.group(1) if match else None
    for place, each in found.items():
        if each != version:
            raise ReleaseError(f"{place} must be {version}, as in the tag (got {each})")
    date = _section(tag, root)["date"]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ReleaseError(
            f"the section of {version} in CHANGELOG.md must have a date (got {date})"
        )


def notes(tag: str, root: Path = ROOT) -> str:
    """Return the section of the changelog for a tag. Raise ReleaseError if there is none."""
    return _section(tag, root)["text"].strip() + "\n"


def chart(image: str, folder: Path, root: Path = ROOT) -> None:
    """Copy the chart to `folder`/specdec with `image` as its default repository of images."""
    copy = folder / CHART.name
    shutil.copytree(root / CHART, copy)
    values = copy / "values.yaml"
    text, count = _REPOSITORY.subn(rf"\g<1>{image}", values.read_text())
    if count != 1:
        raise ReleaseError(f"{values} must have one image.repository (got {count})")
    values.write_text(text)


def _version_of(tag: str) -> str:
    match = _TAG.fullmatch(tag)
    if match is None:
        raise ReleaseError(f"a tag must be v followed by a version such as 1.2.3 (got {tag})")
    return match.group(1)


def _section(tag: str, root: Path) -> dict[str, str]:
    version = _version_of(tag)
    sections = [each.groupdict() for each in _SECTION.finditer((root / "CHANGELOG.md").read_text())]
    found = [each for each in sections if each["version"] == version]
    if len(found) != 1:
        raise ReleaseError(f"CHANGELOG.md must have one section of {version} (got {len(found)})")
    return found[0]


def main(arguments: list[str]) -> None:
    """Run a command. Exit with a message if the release is not consistent."""
    try:
        match arguments:
            case ["check", tag]:
                check(tag)
            case ["notes", tag]:
                print(notes(tag), end="")
            case ["chart", image, folder]:
                chart(image, Path(folder))
            case _:
                sys.exit(__doc__)
    except ReleaseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
