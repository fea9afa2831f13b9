"""A small part of `make fuzz`, and what would be a violation."""

import pytest

from specdec.types.errors import SpecdecError
from tests.fuzz.doors import Door, ViolationError, typed
from tests.fuzz.file_doors import file_doors
from tests.fuzz.run import run

NUM_OF_FILES = 12


@pytest.mark.parametrize("index", range(8))
def test_files_are_accepted_or_refused(tiny_model_dir, tmp_path, index):
    door = file_doors(tiny_model_dir, tmp_path)[index]
    answers = [door.try_number(1, number) for number in range(NUM_OF_FILES)]
    assert len(set(answers)) > 1


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_a_thousand_inputs_over_all_doors(tiny_model_dir, tmp_path):
    report = run(tiny_model_dir, tmp_path, 1000, seed=0)
    print("\n".join(report.table()))
    assert report.violations == []
    assert report.num_inputs == 1000


class Broken(Door):
    name, share = "broken", 1

    def enter(self, random):
        raise KeyError(random.randrange(10))


def test_an_exception_is_a_violation_and_a_function_of_the_number():
    for _ in range(2):
        with pytest.raises(ViolationError, match="KeyError: 1"):
            Broken().try_number(3, 1)


@pytest.mark.parametrize(
    "text", ["two\nlines", "Traceback (most recent call last)", "/site-packages/torch/x.py"]
)
def test_errors_with_internal_texts_are_violations(text):
    with pytest.raises(ViolationError):
        typed(SpecdecError(text))
    assert typed(SpecdecError("one line")) == "SpecdecError"
