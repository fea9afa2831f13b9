"""Two minutes of chaos a service; `make chaos` runs it for longer, with other seeds."""

import pytest

from tests.chaos.suite import SERVICES, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", SERVICES)
def test_two_minutes_of_faults_violate_nothing(tiny_model_dir, tmp_path, name):
    report = run(name, tiny_model_dir, tmp_path, 120, seed=0)
    print("\n".join(report.table()))
    assert report.violations == []
    assert len(report.injected) >= 3
