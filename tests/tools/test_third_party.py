import json
import shutil

from tools.third_party import FOLDER, changed_files


def test_what_is_vendored_is_as_it_was_fetched():
    assert changed_files(FOLDER) == []


def test_a_change_a_loss_and_an_addition_are_noticed(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "third_party")
    names = list(json.loads((folder / "versions.json").read_text())["uplot"]["sha256"])
    changed, lost = names[:2]
    (folder / "uplot" / changed).write_text("something else")
    (folder / "uplot" / lost).unlink()
    (folder / "uplot" / "new.js").write_text("")
    assert changed_files(folder) == sorted(f"uplot/{name}" for name in (changed, lost, "new.js"))
