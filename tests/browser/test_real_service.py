"""Tests of the dashboard on the real service, with both ingresses and real requests."""

import operator
import re
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from safetensors.torch import load_file, save_file

from specdec.client import AdminClient, Client, ClientError, SpeculationChange
from specdec.models.config.end_tokens import read_tokenizer_end
from specdec.types.reports.stats import SpeculationStats
from specdec.types.sampling.sampling_params import SamplingParams
from tests.browser.conftest import NARROW, WIDE
from tests.browser.pages import expect_text, set_mode, tile
from tests.e2e.conftest import running_service
from tests.specdec.tiny import tiny_llama_dir

pytestmark = pytest.mark.e2e

CONFIG = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
PROMPT = [10 + i % 5 for i in range(30)]


def endless_llama_dir(directory):
    """Write a tiny Llama whose greedy text never ends: the logit of its end token is always 0."""
    weights_file = tiny_llama_dir(directory, max_positions=8192) / "model.safetensors"
    weights = load_file(weights_file)
    weights["model.embed_tokens.weight"][read_tokenizer_end(directory)] = 0.0
    save_file(weights, weights_file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module", params=["embedded", "serve"])
def service(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    model = endless_llama_dir(directory / "model")
    flags = ["--ingress", request.param, "--speculative-config", CONFIG]
    with running_service(model, directory / "log", *flags) as running:
        yield running


@pytest.fixture
def always_drafting(service):
    """The service with speculation in mode on, as long as the test runs."""
    with AdminClient(service.grpc_address) as admin:
        admin.set_speculation(SpeculationChange(mode="on"))
        yield service
        admin.set_speculation(SpeculationChange(reset=True))


@contextmanager
def load(address, num_streams=3):
    """Send requests in a loop on `num_streams` threads until the block ends."""
    is_over = threading.Event()
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    def send_requests():
        with Client(address) as client:
            while not is_over.is_set():
                client.generate(PROMPT, params)

    threads = [threading.Thread(target=send_requests) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_the_counts_are_those_that_clients_received(always_drafting, visit):
    """Metrics after 12 requests to a fresh service, one of them too long, and its processes.

    The model has two tokens of about equal probability, so a lookup guesses some of them.
    """
    params = SamplingParams(
        temperature=1.0, max_tokens=60, ignore_eos=True, logit_bias={10: 100.0, 11: 100.0}
    )
    service = always_drafting
    with Client(service.grpc_address) as client, visit(service.http_url) as opened:
        page = opened.page
        expect_text(tile(page, "Requests"), "^0 ")
        stats = SpeculationStats.sum(
            client.generate(PROMPT, params).usage.speculation for _ in range(12)
        )
        with pytest.raises(ClientError):
            client.generate([1] * 100_000, params)
        expect_text(page.locator("#health-facts"), "0 errors.*0 rejected.*1 client error in 1 min")
        expect_text(page.locator(".bars li").first, f"of {stats.num_drafts}$")
        bars = page.locator(".bars li > span:last-child").all_inner_texts()
        counts = [[int(number) for number in text.split(" of ")] for text in bars]
        accepted, reached = zip(*counts, strict=True)
        assert sum(accepted) == stats.num_accepted_tokens > 0
        assert all(map(operator.le, reached[1:], accepted)), "fewer where the next is not drafted"
        length = f"{stats.num_draft_tokens / stats.num_drafts:.3g}"
        expect_text(page.locator(".chart", has_text="Tokens per draft").locator("b").first, length)
        processes = [*service.processes("TargetWorker"), *service.processes(":Router")]
        resident = sum(process.memory_info().rss for process in processes) / 2**20
        value, unit = tile(page, "Memory").inner_text().split()
        shown = float(value) * (1024 if unit == "GiB" else 1)
        assert shown == pytest.approx(resident, rel=0.05)


def num_aborted(service):
    text = httpx.get(f"{service.http_url}/metrics").text
    found = re.search(r'request_success_total\{finished_reason="abort"[^}]*\} (\S+)', text)
    return float(found.group(1))


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_the_page_shows_load_and_turns_speculation_off_and_on(service, visit, size):
    with load(service.grpc_address), visit(service.http_url, size) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        expect_text(tile(page, "Decoding"), "^[1-3]")
        expect_text(tile(page, "Throughput"), r"^[1-9]\S* tokens/s")
        expect_text(tile(page, "First token"), r"^[1-9]\S* ms")
        set_mode(page, "On")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#mode"), "^On, k = 3$")
        expect_text(tile(page, "Acceptance"), r"^\d+ %")
        set_mode(page, "Off")
        page.get_by_label("Reason").fill("a test")
        page.get_by_role("button", name="Apply").click()
        expect_text(page.locator("#mode"), "^Off$")
        expect_text(page.locator("#gain"), "^no drafts$")
        expect_text(page.locator("#audit li").first, "mode: off.*a test")
        expect_text(page.locator("#decisions li").first, "no drafts.*set by an operator")
        page.get_by_role("button", name="Reset to configured").click()
        expect_text(page.locator("#audit li").first, "reset")


# Clicks in the page: a click by the test may come after so small a model has finished.
STOP_AT_THE_FOURTH_TOKEN = """() => {
  const output = document.querySelector("#output");
  const observer = new MutationObserver(() => {
    if (output.querySelectorAll(".token").length < 4) return;
    observer.disconnect();
    document.querySelector("#try-stop").click();
  });
  observer.observe(output, {childList: true, subtree: true});
}"""


def test_an_output_streams_and_stopping_it_aborts_the_request_in_the_engine(service, visit):
    with visit(service.http_url) as opened:
        page = opened.page
        expect_text(page.locator("#link"), "Live")
        page.get_by_label("Prompt").fill("the water under the bridge is the water under the bridge")
        page.get_by_label("as chat").uncheck()
        page.get_by_label("Temperature").fill("0")
        page.locator("#try-speculation").select_option("on")
        page.get_by_label("Max tokens").fill("100")
        page.get_by_role("button", name="Generate").click()
        expect_text(page.locator("#try-figures"), "tokens/s.*(reached max tokens|complete)")
        assert page.locator("#output .target").count() > 0
        before = num_aborted(service)
        page.get_by_label("Max tokens").fill("4000")  # seconds, so that the click comes first
        page.evaluate(STOP_AT_THE_FOURTH_TOKEN)
        page.get_by_role("button", name="Generate").click()
        expect_text(page.locator("#try-figures"), "stopped")
        deadline = time.monotonic() + 60
        while num_aborted(service) == before and time.monotonic() < deadline:
            page.wait_for_timeout(250)
        assert num_aborted(service) == before + 1
