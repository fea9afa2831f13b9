"""Tests of the measurement of the host's part of a step, on few rows."""

from benchmarks.host_time import HostBench


def test_the_time_of_a_step_has_three_parts(tmp_path):
    times = HostBench(tmp_path, num_rows=2, num_drafts=2).run()
    assert len(times) == 16
    assert all(min(each) > 0 for each in times)


def test_drafts_take_time_of_the_engine(tmp_path):
    plain, drafted = (
        [engine_s for engine_s, _, _ in HostBench(tmp_path, 8, count).run()] for count in (0, 4)
    )
    assert min(drafted) > min(plain)
