"""Datasets (lengths, prefixes, cache salts), and the distribution of arrival times."""

from functools import partial
from itertools import pairwise

import pytest
from scipy import stats

from cluster.cli.bench.dataset import (
    PromptFileDataset,
    RandomDataset,
    arrival_times,
    read_prompts,
)
from specdec.types.errors import InvalidValueError


def words(request):
    return request.prompt.split()


def test_prompts_of_a_file_are_repeated_in_order():
    requests = PromptFileDataset(["a", "b"], max_tokens=9).requests(3, run=0)
    assert [(each.prompt, each.max_tokens) for each in requests] == [("a", 9), ("b", 9), ("a", 9)]
    assert len({each.cache_salt for each in requests}) == 1


def test_a_prompt_of_a_file_may_have_unicode_line_separators(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('"One\u2028two"\r\n{"prompt": "Three\x85"}\n'.encode())
    assert read_prompts(path) == ["One\u2028two", "Three\x85"]


@pytest.mark.parametrize("line", ["[", "[" * 9000, "9" * 5000], ids=lambda line: line[:30])
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"One"\n{line}\n')
    with pytest.raises(InvalidValueError, match="line 2"):
        read_prompts(path)


def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(InvalidValueError, match=r"^prompts is '.*; it must be a JSON lines"):
        read_prompts(path)


@pytest.mark.parametrize(
    "make", [partial(PromptFileDataset, ["a"], 9), partial(RandomDataset, 5, 9)]
)
def test_runs_do_not_share_the_prefix_cache(make):
    """Another run, in this process or a later one, may send the same words."""
    dataset = make()
    salts = [{each.cache_salt for each in dataset.requests(3, run)} for run in (0, 1, 0)]
    assert [len(each) for each in salts] == [1, 1, 1]
    assert len(set.union(*salts)) == 3
    assert all(salts[0])
    assert make(with_cache_salt=False).requests(1, 0)[0].cache_salt == ""


def test_the_number_of_random_words():
    for each in RandomDataset(12, 5).requests(20, 0):
        assert (len(words(each)), each.max_tokens) == (12, 5)


def test_lengths_cover_exactly_their_range():
    requests = RandomDataset(10, 100, range_ratio=0.5).requests(400, 0)
    inputs, outputs = (
        {len(words(each)) for each in requests},
        {each.max_tokens for each in requests},
    )
    assert inputs == set(range(5, 16))  # each missing with odds of (10/11)^400 = 3e-17
    assert (min(outputs) >= 50, max(outputs) <= 150, len(outputs) > 80) == (True, True, True)


def test_all_prompts_share_the_prefix_alone():
    requests = RandomDataset(20, 5, prefix_len=8).requests(10, 0)
    assert len({tuple(words(each)[:8]) for each in requests}) == 1
    assert len({tuple(words(each)[8:]) for each in requests}) == 10
    assert {len(words(each)) for each in requests} == {28}


def test_the_seed_and_the_run_fix_the_words():
    dataset = RandomDataset(20, 5, seed=1)
    first = list(map(words, dataset.requests(3, 0)))
    assert first == list(map(words, dataset.requests(3, 0)))
    assert first != list(map(words, dataset.requests(3, 1)))
    assert first != list(map(words, RandomDataset(20, 5, seed=2).requests(3, 0)))


COUNT = 20_000
# A correct generator fails a test of this significance for one seed in a million; the seed is
# fixed, so a failure means that the code changed. The three cases
# together have false-alarm odds of 3 in a million.
SIGNIFICANCE = 1e-6


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_gamma_distribution_of_the_rate(burstiness):
    rate = 5.0
    times = arrival_times(COUNT, rate, burstiness, seed=7)
    gaps = [times[0], *(after - before for before, after in pairwise(times))]
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > SIGNIFICANCE
    if burstiness != 1.0:  # the test has the power to detect another shape
        assert stats.kstest(gaps, stats.expon(scale=1 / rate).cdf).pvalue < SIGNIFICANCE


def test_the_variance_of_poisson_counts_equals_their_mean():
    """Counts in windows have variance = mean; 4 windows a request, sd of the ratio about 0.02."""
    times = arrival_times(COUNT, 10.0, 1.0, seed=3)
    windows = [0] * (int(times[-1] / 0.4) + 1)
    for each in times:
        windows[int(each / 0.4)] += 1
    assert stats.tvar(windows) / stats.tmean(windows) == pytest.approx(1, abs=0.12)  # 6 sd


def test_times_ascend_and_depend_on_the_seed_alone():
    times = arrival_times(50, 2.0, 1.0, seed=1)
    assert times == sorted(times)
    assert times == arrival_times(50, 2.0, 1.0, seed=1)
    assert times != arrival_times(50, 2.0, 1.0, seed=2)
    assert arrival_times(50, 4.0, 1.0, seed=1) == pytest.approx([each / 2 for each in times])
