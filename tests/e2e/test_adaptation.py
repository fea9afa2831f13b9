"""The shipped head of the demo model follows traffic: SQL, then German, on a running service.

`-s` prints the figures of docs/adaptation.md as JSON lines. Nothing is asserted about time: the
trainer gets the CPU time that the service leaves, so its CPU seconds are printed as well.
"""

import json
import random
import shutil
import statistics
import sys
import threading
import time
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.client import AdminClient, Client, DrafterOrder
from specdec.models.resolve import resolve
from specdec.types.drafters import VersionState
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service
from tests.e2e.domains import german, prompts, sql
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL, HEAD = "smollm2-135m-instruct", "smollm2-135m-instruct-eagle3"
MAX_STREAMS = 8
ARRIVALS_PER_S = 0.5
"""Requests a second, which leave the cores idle for a part of the time."""
NUM_VERSIONS = 2
"""Runs of the trainer for each domain."""
NUM_THREADS = 2
"""CPU threads of the trainer: all cores, in the time in which the service leaves them idle."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    speculation = {"model": HEAD, "quantization": "int8", "policy": "threshold"}
    flags = ["--speculative-config", json.dumps(speculation | {"num_speculative_tokens": 5})]
    flags += ["--quantization", "int8", "--max-model-len", "4096", "--max-num-seqs", "8"]
    flags += ["--training-buffer-tokens", "500000"]
    log = tmp_path_factory.mktemp("adaptation") / "log"
    with running_service(None, log, "--model", MODEL, *flags) as service:
        yield service


def params(seed):
    """Return those of the model's card, shorter."""
    return SamplingParams(temperature=0.2, top_p=0.9, max_tokens=200, seed=seed)


@dataclass(frozen=True)
class Measured:
    """Answers to the same prompts: their tokens, and tokens of a step."""

    answers: list[tuple[int, ...]]
    tokens_per_step: float


def measured_prompts(domain):
    """Return the prompts that `measured` asks, which `Traffic` leaves out."""
    return list(islice(prompts(domain, random.Random(1)), 8))


def measured(service, domain, count=8):
    """Return the answers to prompts that are never trained on."""
    asked = measured_prompts(domain)[:count]
    with Client(service.grpc_address, timeout_s=600) as client, ThreadPoolExecutor(4) as pool:
        done = list(
            pool.map(lambda each: client.generate(each[1], params(each[0])), enumerate(asked))
        )
    drafts = sum(each.usage.speculation.num_drafts for each in done)
    accepted = sum(each.usage.speculation.num_accepted_tokens for each in done)
    return Measured([each.choices[0].token_ids for each in done], 1 + accepted / drafts)


class Traffic:
    """Requests of a domain that allow training, which arrive at random (a Poisson process)."""

    def __init__(self, service, domain):
        self._service, self._domain = service, domain
        self._is_ended = threading.Event()
        self.num_tokens = 0

    @contextmanager
    def running(self):
        with ThreadPoolExecutor(MAX_STREAMS + 1) as pool:
            arrivals = pool.submit(self._arrive, pool)
            try:
                yield self
            finally:
                self._is_ended.set()
                for each in arrivals.result():
                    each.result()

    def _arrive(self, pool):
        rng, answers, seed = random.Random(100), [], 0
        left_out = measured_prompts(self._domain)
        asked = (each for each in prompts(self._domain, rng) if each not in left_out)
        while not self._is_ended.wait(rng.expovariate(ARRIVALS_PER_S)):
            answers.append(pool.submit(self._ask, next(asked), seed := seed + 1))
        return answers

    def _ask(self, prompt, seed):
        with Client(self._service.grpc_address, timeout_s=600) as client:
            for chunk in client.generate_stream(prompt, params(seed), allow_training=True):
                self.num_tokens += len(chunk.token_ids)
                if self._is_ended.is_set():
                    return


@contextmanager
def trainer(service, directory, *words):
    """Run `specdec adapt`; yield the command, whose child trains."""
    command = [sys.executable, "-m", "cluster", "adapt", MODEL, str(directory), *words]
    command += ["--quantization", "int8", "--threads", str(NUM_THREADS)]
    command += ["--address", service.grpc_address]
    with (directory.parent / "adapt.log").open("wb") as log:
        process = psutil.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    print((directory.parent / "adapt.log").read_text())


def cpu_seconds(processes):
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def with_children(process):
    return [process, *process.children(recursive=True)]


def versions_of(service):
    """Return the drafts of each version so far, and the tokens of a step with it."""
    with AdminClient(service.grpc_address) as admin:
        [report] = admin.drafters()
    found = [each.speculation for each in report.versions]
    return [(each.num_drafts, round(each.mean_acceptance_length, 3)) for each in found]


def active_version(service):
    with AdminClient(service.grpc_address) as admin:
        [report] = admin.drafters()
    [active] = [each for each in report.versions if each.state is VersionState.ACTIVE]
    return active.number


def forget_samples(service):
    """Take the samples of the traffic before, which the next trainer would train on."""
    with AdminClient(service.grpc_address) as admin:
        while any(each.num_left_tokens for each in admin.take_samples()):
            pass


def show(**figures):
    print(json.dumps(figures), flush=True)


@pytest.mark.parametrize("domain", [sql, german], ids=lambda each: each.__name__)
def test_tokens_of_a_step_grow_after_a_shift_of_traffic(service, domain, tmp_path):
    before, version = measured(service, domain), active_version(service)
    forget_samples(service)
    words = ("--num-versions", str(NUM_VERSIONS))
    traffic, started_at = Traffic(service, domain), time.monotonic()
    with trainer(service, tmp_path / "versions", *words) as process, traffic.running():
        while process.poll() is None:
            show(
                domain=domain.__name__,
                seconds=round(time.monotonic() - started_at),
                active_version=active_version(service),
                trainer_cpu_seconds=round(cpu_seconds(with_children(process))),
                rank_cpu_seconds=round(cpu_seconds(service.processes("TargetWorker"))),
                answer_tokens=traffic.num_tokens,
                versions=versions_of(service),
            )
            time.sleep(10)
    assert process.returncode == 0
    assert active_version(service) > version, "a version was trained, loaded and kept"
    after = measured(service, domain)
    show(domain=domain.__name__, before=before.tokens_per_step, after=after.tokens_per_step)
    assert after.answers == before.answers, "the tokens are unchanged"
    assert after.tokens_per_step > before.tokens_per_step + 0.1


class Turns:
    """Stops a command for every other turn of a few seconds, of which it keeps the kind."""

    TURN_S = 4.0

    def __init__(self, process):
        self._process = process
        self._is_ended = threading.Event()
        self.changes = [(0.0, True)]

    @contextmanager
    def running(self):
        with ThreadPoolExecutor(1) as pool:
            turns = pool.submit(self._turn)
            try:
                yield self
            finally:
                self._is_ended.set()
                turns.result()

    def _turn(self):
        for is_stopped in cycle([True, False]):
            self._set(is_stopped)
            self.changes.append((time.monotonic(), not is_stopped))
            if self._is_ended.wait(self.TURN_S):
                self._set(False)
                return

    def _set(self, is_stopped):
        for each in with_children(self._process):  # the command first, which lets the others go on
            each.suspend() if is_stopped else each.resume()

    def runs(self, start, end):
        """Return whether the command ran or stood for all of a period; None for a change in it."""
        index = bisect(self.changes, (start, True)) - 1
        is_changed = index + 1 < len(self.changes) and self.changes[index + 1][0] < end
        return None if is_changed else self.changes[index][1]


def test_a_trainer_slows_serving_little(service, tmp_path):
    """One stream with pauses, in which the trainer has the cores; TTFT counts as a step."""
    traffic, rng = Traffic(service, sql), random.Random(2)
    with traffic.running():
        wait_until(lambda: traffic.num_tokens > 3000, deadline_s=300)
    words = ("--min-tokens", "2000", "--num-epochs", "1000")
    steps = {True: [], False: []}
    with trainer(service, tmp_path / "versions", *words) as process:
        wait_until(lambda: cpu_seconds(with_children(process)) > 40, deadline_s=600)
        begun_with = cpu_seconds(with_children(process))
        with Turns(process).running() as turns, Client(service.grpc_address) as client:
            ends_at = time.monotonic() + 240
            for seed, prompt in enumerate(prompts(sql, rng)):
                begins_at = time.monotonic()
                if begins_at > ends_at:
                    break
                times = [begins_at]
                for _ in client.generate_stream(prompt, params(seed)):
                    times.append(time.monotonic())
                for start, end in pairwise(times):
                    if (kind := turns.runs(start, end)) is not None:
                        steps[kind].append(end - start)
                time.sleep(rng.expovariate(1 / (times[-1] - begins_at)))
        trained_s = cpu_seconds(with_children(process)) - begun_with
    running, stopped = (1e3 * statistics.fmean(steps[each]) for each in (True, False))
    show(
        ms_a_step_beside_the_trainer=round(running, 3),
        ms_a_step_without=round(stopped, 3),
        ratio=round(running / stopped, 3),
        steps=[len(steps[each]) for each in (True, False)],
        trainer_cpu_seconds=round(trained_s, 1),
    )
    assert trained_s > 5, "it trained meanwhile"


def test_a_long_answer_keeps_its_acceptance(service):
    """A step yields as many tokens around the 2,000th token of answers as around the 200th."""
    asked = [*measured_prompts(sql), *measured_prompts(german)]
    long = replace(params(0), max_tokens=2100, ignore_eos=True, temperature=0.8)
    found = {200: [], 2000: []}

    def ask(prompt):
        with Client(service.grpc_address, timeout_s=600) as client:
            ends = accumulate(len(each.token_ids) for each in client.generate_stream(prompt, long))
            for start, end in pairwise(ends):
                for position, lengths in found.items():
                    if abs(start - position) <= 100:
                        lengths.append(end - start)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, asked))
    early, late = map(statistics.fmean, found.values())
    show(tokens_per_step_at_200=round(early, 2), tokens_per_step_at_2000=round(late, 2))
    assert late > 0.9 * early


def noisy_head(directory, scale):
    """Copy the configured head, with noise of a share of its weights' deviation."""
    shutil.copytree(resolve(HEAD), directory)
    torch.manual_seed(0)
    file = directory / "model.safetensors"
    tensors = {
        name: each + scale * each.float().std() * torch.randn(each.shape)
        if each.is_floating_point()
        else each
        for name, each in load_file(file).items()
    }
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)
    return str(directory)


def test_tokens_are_unchanged_across_20_swaps(service, tmp_path):
    expected, num_swaps = measured(service, sql, 8), 0
    with ThreadPoolExecutor(1) as pool, AdminClient(service.grpc_address) as admin:
        [report] = admin.set_drafter(DrafterOrder(path=noisy_head(tmp_path / "head", 0.2)))
        new = report.versions[-1].number
        while num_swaps < 20:
            answers = pool.submit(measured, service, sql, 8)
            while not answers.done():
                admin.set_drafter(DrafterOrder(version=(1, new)[num_swaps % 2]))
                num_swaps += 1
                time.sleep(0.5)
            assert answers.result().answers == expected.answers
        show(swaps=num_swaps)
        admin.set_drafter(DrafterOrder(version=1))


def test_a_worse_version_is_rolled_back(service, tmp_path):
    expected, version = measured(service, sql, 8), active_version(service)
    with AdminClient(service.grpc_address) as admin:
        admin.set_drafter(DrafterOrder(path=noisy_head(tmp_path / "head", 1.0)))
        assert measured(service, sql, 8).answers == expected.answers
        [report] = admin.drafters()
    worse = report.versions[-1]
    show(drafts_before_rollback=worse.speculation.num_drafts)
    assert worse.state is VersionState.ROLLED_BACK
    assert active_version(service) == version
