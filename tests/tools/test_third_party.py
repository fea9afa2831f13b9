import json
import shutil

from tools.third_party import FOLDER, changed_files


def test_vendored_files_match_their_recorded_digests():
    assert changed_files(FOLDER) == []


def test_changed_missing_and_unknown_files_are_reported(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "third_party")
    names = list(json.loads((folder / "versions.json").read_text())["uplot"]["sha256"])
    changed, missing = names[:2]
    (folder / "uplot" / changed).write_text("something else")
    (folder / "uplot" / missing).unlink()
    (folder / "uplot" / "new.js").write_text("")
    assert changed_files(folder) == sorted(f"uplot/{name}" for name in (changed, missing, "new.js"))
