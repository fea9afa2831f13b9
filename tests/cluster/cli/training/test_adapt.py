"""`specdec adapt`: samples from a service, versions to it; without training a model."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from grpc import StatusCode

from cluster.cli.main import main
from cluster.cli.training import adapt as adapt_module
from cluster.cli.training.adapt import AdaptationLoop, SampleSource
from specdec.client import ClientError, DrafterReport, DrafterVersion, SampleBatch, ServedSample
from specdec.training.adaptation import TooFewTokensError, Version
from specdec.training.atomic_files import sole_writer
from specdec.types.drafters import DrafterOrder, VersionState
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.stats import SpeculationStats


class Service:
    """Client of a service whose replicas have `batches`, taken in order."""

    def __init__(self, directory, is_pinned=False):
        versions = (
            DrafterVersion(1, "absent", VersionState.READY, SpeculationStats(), 0),
            DrafterVersion(2, str(directory), VersionState.ACTIVE, SpeculationStats(), 0),
        )
        self.reports = (
            DrafterReport("r0", fault="no such directory"),
            DrafterReport("r1", versions, is_pinned),
        )
        self.batches = []
        self.orders = []
        self.errors = []  # of the next calls; None where one succeeds

    def _call(self):
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error

    def take_samples(self):
        self._call()
        return self.batches.pop(0) if self.batches else (SampleBatch("r1"),)

    def drafters(self):
        self._call()
        return self.reports

    def set_drafter(self, order):
        self.orders.append(order)
        self._call()
        return self.reports


class Trainer:
    """Adaptation that notes its calls and returns a version."""

    def __init__(self, directory, min_samples=0):
        self.directory = directory
        self.min_samples = min_samples
        self.calls = []

    def train(self, head, samples, report):
        self.calls.append((head, list(samples)))
        if len(samples) < self.min_samples:
            raise TooFewTokensError("9 answer tokens are held out (minimum 512)")
        return Version(self.directory, 1.5, 1.8, len(samples))


def batch(*prompts, length=10, left=0):
    samples = tuple(ServedSample((each,) * length, 4, 0.0) for each in prompts)
    return (SampleBatch("r1", samples, left),)


@pytest.fixture
def head(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_samples_are_enough_by_tokens_and_prompts(head):
    service = Service(head)
    source = SampleSource(service, min_tokens=30, max_tokens=1000)
    service.batches = [batch(1, 1, 1), batch(2, left=20), batch(3)]
    assert not source.read(), "one prompt leaves none to hold out"
    assert source.read()
    assert not service.batches, "what was left on the replica is read too"
    assert len(source.mark_used()) == 5
    service.batches = [batch(4, 5)]
    assert not source.read(), "20 new tokens"
    service.batches = [batch(6)]
    assert source.read()
    assert len(source.mark_used()) == 8, "earlier samples are trained on again"


def test_the_oldest_and_very_long_samples_are_dropped(head):
    service = Service(head)
    source = SampleSource(service, min_tokens=1, max_tokens=25)
    service.batches = [batch(1, 2, 3), batch(9, length=10_000)]
    assert source.read()
    source.read()
    assert [each.token_ids[0] for each in source.mark_used()] == [2, 3]


def test_a_better_version_of_the_active_head_is_loaded(head, capsys):
    service, trainer = Service(head), Trainer(Path("/versions/version-00001"))
    service.batches = [batch(1), batch(2), batch(3, 4)]
    waits = []
    source = SampleSource(service, min_tokens=20, max_tokens=1000)
    AdaptationLoop(service, source, trainer).run(2, lambda: waits.append(1))
    assert [(each, len(samples)) for each, samples in trainer.calls] == [(head, 2), (head, 4)]
    assert service.orders == [DrafterOrder(path="/versions/version-00001")] * 2
    assert len(waits) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["/versions/version-00001"] * 2
    assert "replica r0: no such directory" in printed.err
    assert "2 samples: held-out acceptance length 1.50 before, 1.80 after" in printed.err


@pytest.mark.parametrize(("directory", "is_pinned"), [(None, False), (Path("/v"), True)])
def test_a_version_that_is_not_better_or_not_wanted_is_not_loaded(head, directory, is_pinned):
    service, trainer = Service(head, is_pinned), Trainer(directory)
    service.batches = [batch(1, 2)]
    AdaptationLoop(service, SampleSource(service, 1, 100), trainer).run(1, lambda: None)
    assert service.orders == []


def test_too_few_samples_are_kept_for_a_later_version(head, capsys):
    service, trainer = Service(head), Trainer(Path("/versions/version-00001"), min_samples=4)
    service.batches, waits = [batch(1, 2), batch(3, 4)], []
    source = SampleSource(service, min_tokens=20, max_tokens=1000)
    AdaptationLoop(service, source, trainer).run(1, lambda: waits.append(1))
    assert [len(samples) for _, samples in trainer.calls] == [2, 4]
    assert len(waits) == len(service.orders) == 1
    printed = capsys.readouterr().err
    assert "2 samples: 9 answer tokens are held out (minimum 512); waiting for more" in printed
    assert "a larger --max-tokens helps" in printed


def test_after_too_few_held_out_answers_the_next_sample_is_enough(head):
    service, trainer = Service(head), Trainer(Path("/versions/version-00001"), min_samples=3)
    service.batches, waits = [batch(1, 2)], []

    def wait():
        waits.append(len(trainer.calls))
        assert len(waits) < 9, "it waits for more than a sample"
        if len(waits) == 3:
            service.batches = [batch(3)]

    AdaptationLoop(service, SampleSource(service, 20, 1000), trainer).run(1, wait)
    assert [len(samples) for _, samples in trainer.calls] == [2, 3]
    assert waits == [1, 1, 1], "it trains only where there are more samples"


def test_more_new_tokens_than_are_kept_are_refused(head):
    with pytest.raises(InvalidValueError, match=r"min_tokens is 30; .* max_tokens \(20\)"):
        SampleSource(Service(head), min_tokens=30, max_tokens=20)


TEMPORARY = ClientError(StatusCode.UNAVAILABLE, "the service is unavailable")


@pytest.mark.parametrize("num_successes", range(4))  # before samples, head, pin and order
def test_a_temporary_failure_loses_no_sample_and_no_version(head, num_successes, capsys):
    service, trainer = Service(head), Trainer(Path("/versions/version-00001"))
    service.batches, waits = [batch(1, 2)], []
    service.errors = [None] * num_successes + [TEMPORARY]
    source = SampleSource(service, min_tokens=20, max_tokens=1000)
    AdaptationLoop(service, source, trainer).run(1, lambda: waits.append(1))
    assert [len(samples) for _, samples in trainer.calls] == [2]
    assert service.orders[-1] == DrafterOrder(path="/versions/version-00001")
    assert len(waits) == 1
    assert "the service is unavailable; trying again" in capsys.readouterr().err


def test_a_version_that_arrived_is_not_loaded_twice(head):
    service, trainer = Service(head), Trainer(Path("/versions/version-00001"))
    service.batches = [batch(1, 2)]
    late = ClientError(StatusCode.DEADLINE_EXCEEDED, "not complete within 60 s")
    service.errors = [None, None, None, late]
    new = DrafterVersion(3, str(trainer.directory), VersionState.LOADING, SpeculationStats(), 0)

    def arrive():
        service.reports = (DrafterReport("r1", (*service.reports[1].versions, new)),)

    AdaptationLoop(service, SampleSource(service, 1, 100), trainer).run(1, arrive)
    assert service.orders == [DrafterOrder(path="/versions/version-00001")]


def test_another_failure_ends_it(head):
    service = Service(head)
    service.errors = [ClientError(StatusCode.UNAUTHENTICATED, "the admin token is wrong")]
    with pytest.raises(ClientError, match="token is wrong"):
        AdaptationLoop(service, SampleSource(service, 1, 100), Trainer(None)).run(1, lambda: None)


def test_without_a_head_there_is_nothing_to_train(head):
    service = Service(head)
    service.reports = (DrafterReport("r0"),)
    service.batches = [batch(1, 2)]
    with pytest.raises(NotReadyError, match="no replica has a draft head"):
        AdaptationLoop(service, SampleSource(service, 1, 100), Trainer(None)).run(1, lambda: None)


def test_a_directory_in_use_is_refused_in_one_line(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(adapt_module, "run_when_idle", lambda num_threads: None)
    with sole_writer(tmp_path / ".run.lock", "trains in"):
        arguments = ["adapt", str(tiny_model_dir), str(tmp_path)]
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: another process trains in {tmp_path}"
