# Modules: specdec.engine.engine_setup, specdec.engine.metrics.metric_definitions
# Modules: specdec.llm.concurrency
# Modules: specdec.llm.llm_engine, specdec.llm.base_llm, specdec.llm.local_executor
# Modules: specdec.llm.metrics
# Modules: specdec.engine.executor, specdec.engine.lifecycle
# Modules: specdec.llm.outputs
"""`LLM` on the tiny model: batches, outputs, metrics and shutdown."""

from dataclasses import replace

import pytest

from specdec import LLM, SamplingParams, SpeculationOptions, StructuredOutput
from specdec.llm import Counter, Histogram, Vector
from specdec.types.errors import InvalidValueError
from specdec.types.token_display import token_texts
from tests.specdec.llm.models import arguments, metrics_of
from tests.specdec.tiny import renamed_dtype_dir

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    "The river begins as a thread of cold water.",
    "Every spring",
    "the water under the bridge is the water under the bridge is",
    "Ask the baker, ask the children: the river",
    "When will it open?",
    "Further south the valley widens.",
]


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir)) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    """Return the same model without speculation."""
    with LLM(**arguments(tiny_model_dir, speculative_config=None)) as llm:
        yield llm


def tokens(outputs):
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_a_batch_larger_than_max_num_seqs_is_returned_in_order(llm, plain):
    outputs = llm.generate(PROMPTS * 3, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS * 3
    assert tokens(outputs) == tokens(plain.generate(PROMPTS, GREEDY, use_tqdm=False)) * 3
    first = outputs[0]
    assert first.prompt_token_ids == llm.get_tokenizer().encode(PROMPTS[0])
    assert first.outputs[0].text == llm.get_tokenizer().decode(
        first.outputs[0].token_ids, skip_special_tokens=True
    )
    assert (first.finished, first.outputs[0].finish_reason) == (True, "length")
    assert first.outputs[0].finished()
    assert first.metrics.num_generation_tokens == 24
    assert 0 < first.metrics.first_token_latency < 60
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_auto_is_the_dtype_of_the_checkpoint(tiny_model_dir, tmp_path):
    model_dir = renamed_dtype_dir(tiny_model_dir, tmp_path / "model", dtype="bfloat16")
    with LLM(**arguments(model_dir, dtype="auto", speculative_config=None)) as llm:
        assert llm._llm_engine.config.dtype == "bfloat16"
        [output] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 24


def test_metrics_are_the_sums_over_outputs(llm):
    before = metrics_of(llm)
    outputs = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)
    after = metrics_of(llm)
    grown = {
        name: value - before.get(name, 0) for name, value in after.items() if isinstance(value, int)
    }
    drafts = [output.speculation for output in outputs]
    assert grown["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert grown["generation_tokens"] == sum(map(len, tokens(outputs)))
    assert grown["spec_decode_num_drafts"] == sum(each.num_drafts for each in drafts) > 0
    assert grown["spec_decode_num_draft_tokens"] == sum(each.num_draft_tokens for each in drafts)
    num_accepted = sum(each.num_accepted_tokens for each in drafts)
    assert grown["spec_decode_num_accepted_tokens"] == num_accepted > 0
    by_position = "spec_decode_num_accepted_tokens_per_pos"
    assert sum(after[by_position]) - sum(before[by_position]) == num_accepted
    assert grown["request_success length"] == grown["requests_received"] == len(outputs)
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    latency = "e2e_request_latency_seconds"
    assert after[latency].count - before[latency].count == len(outputs)
    assert after[latency].buckets["+Inf"] == after[latency].count


def test_the_loop_of_vllms_example_counts_under_its_names(llm):
    """Names are compared as in the example; every metric but a histogram has a value."""
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    counts, accepted_at = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0), [0] * 3
    for metric in llm.get_metrics():
        for name in counts:
            if metric.name == f"vllm:spec_decode_num_{name}":
                assert isinstance(metric, Counter)
                counts[name] += metric.value
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            assert metric.value == sum(metric.values)
            for position in range(len(metric.values)):
                accepted_at[position] += metric.values[position]
        elif not isinstance(metric, Histogram):
            assert metric.value >= 0
    own = metrics_of(llm)
    assert counts == {name: own[f"spec_decode_num_{name}"] for name in counts}
    assert sum(accepted_at) == counts["accepted_tokens"] > 0


def test_a_prefix_that_is_given_is_the_only_one(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir, metric_prefix="specdec:")) as llm:
        names = [metric.name for metric in llm.get_metrics()]
    assert names
    assert all(name.startswith("specdec:") for name in names)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("agenerate", r"AsyncLLM\(model\).generate"),
        ("embed", "the models generate text"),
        ("reset_prefix_cache", "another cache_salt"),
        ("xyzzy", "has no attribute 'xyzzy'$"),
    ],
)
def test_the_error_for_a_method_of_another_engine_has_a_hint(llm, name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(llm, name)


def test_an_invalid_prompt_is_rejected_before_any_runs(llm):
    before = metrics_of(llm)
    with pytest.raises(InvalidValueError, match=r"prompt length of prompts\[1\] is 500; .* 159"):
        llm.generate(["fine", [5] * 500], GREEDY)
    with pytest.raises(InvalidValueError, match=r"max_tokens of prompts\[0\] is 200"):
        llm.generate("fine", SamplingParams(max_tokens=200))
    with pytest.raises(InvalidValueError, match="sampling_params length is 2"):
        llm.generate(["one", "two", "three"], [GREEDY, GREEDY])
    with pytest.raises(InvalidValueError, match=r"sampling_params of prompts\[0\] is {'n': 1}"):
        llm.generate("one", {"n": 1})
    with pytest.raises(InvalidValueError, match=r"priority of prompts\[1\] is None"):
        llm.generate(["one", "two"], GREEDY, priority=[1, None])
    with pytest.raises(InvalidValueError, match="sampling_params length is 0"):
        llm.generate(["one", "two"], [])
    assert metrics_of(llm) == before


def test_prompts_of_every_kind(llm):
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    same = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(same, GREEDY, use_tqdm=False)
    assert len(set(map(tuple, tokens(outputs)))) == 1
    assert [output.prompt for output in outputs] == [PROMPTS[0], PROMPTS[0], None, None]
    assert tokens(llm.generate(ids, GREEDY, use_tqdm=False)) == [outputs[0].outputs[0].token_ids]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_separate_parameters(llm):
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 7)]
    outputs = llm.generate(PROMPTS[:2], each, use_tqdm=False)
    assert list(map(len, tokens(outputs))) == [3, 7]


def test_seeds_derive_from_the_given_seed(tiny_model_dir, llm):
    sampled = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    batch = [PROMPTS[0]] * 3
    generated = []
    for _ in range(2):
        with LLM(**arguments(tiny_model_dir, seed=7)) as seeded:
            generated.append(seeded.generate(batch, sampled, use_tqdm=False))
    assert tokens(generated[0]) == tokens(generated[1])
    assert len(set(map(tuple, tokens(generated[0])))) == 3, (
        "a prompt that comes again has other luck"
    )
    again = [SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=each.seed)
             for each in generated[0]]  # fmt: skip
    assert tokens(llm.generate(batch, again, use_tqdm=False)) == tokens(generated[0])


def test_choices_and_log_probabilities(llm):
    params = SamplingParams(
        n=3, seed=1, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1, temperature=1.0
    )
    [output] = llm.generate(2 * PROMPTS[0], params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.num_cached_tokens == 0  # though the others reuse the KV that choice 0 computes
    for choice in output.outputs:
        assert len(choice.logprobs) == len(choice.token_ids) == 5
        own = [
            position[token]
            for token, position in zip(choice.token_ids, choice.logprobs, strict=False)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(each.logprob for each in own))
        for position in choice.logprobs:
            by_rank = sorted(position.values(), key=lambda each: each.rank)
            assert [each.rank for each in by_rank[:2]] == [1, 2]
            assert by_rank[0].logprob >= by_rank[1].logprob
    assert output.prompt_logprobs[0] is None
    rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(token in position for token, position in rest)


def test_given_tokens_have_log_probabilities(llm):
    """Their rank is unknown unless they are among the sampled and the most likely ones."""
    [likely] = llm.generate(
        PROMPTS[1], SamplingParams(max_tokens=1, temperature=0, logprobs=20), use_tqdm=False
    )
    [expected] = likely.outputs[0].logprobs
    given = [list(expected)[10], next(iter(expected))]
    params = SamplingParams(max_tokens=1, logprob_token_ids=given, temperature=0)
    [position] = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].logprobs
    assert [each.rank for each in position.values()] == [1, None]
    for token in given:
        assert position[token].logprob == pytest.approx(expected[token].logprob, abs=1e-5)


def test_stop_strings_and_structured_output(llm):
    [whole] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    word = whole.outputs[0].text[4:7]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(word,))
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", word)
    assert output.outputs[0].text == whole.outputs[0].text.partition(word)[0]
    choice = StructuredOutput(choice=("spring", "autumn"))
    params = SamplingParams(temperature=0, structured_output=choice)
    [output] = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert output.outputs[0].text in choice.choice


def test_a_chat_is_rendered_by_the_chat_template(llm):
    messages = [{"role": "user", "content": "When will it open?"}]
    prompt = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == prompt
    assert tokens([output]) == tokens(llm.generate(prompt, GREEDY, use_tqdm=False))
    parts = [{"role": "user", "content": [{"type": "text", "text": "When will it open?"}]}]
    assert tokens(llm.chat([messages, parts], GREEDY, use_tqdm=False)) == tokens([output]) * 2


def test_variables_that_the_chat_template_lacks_are_logged(llm, caplog):
    messages = [{"role": "user", "content": "When will it open?"}]
    plain = llm.chat(messages, GREEDY, use_tqdm=False)
    variables = {"tone": "kind"}
    given = llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs=variables)
    assert tokens(given) == tokens(plain)
    assert "chat_template_kwargs: the chat template does not read tone" in caplog.text


class Bar:
    """Records its calls; may stop the batch as Ctrl-C does."""

    def __init__(self, total, error=None, **_):
        self.total, self.error, self.count = total, error, 0

    def set_postfix_str(self, text, refresh):
        self.text = text

    def update(self, count):
        self.count += count
        if self.error is not None:
            raise self.error

    def close(self):
        self.is_closed = True


def test_a_custom_progress_bar(llm, capfd):
    bars = []
    llm.generate(PROMPTS, GREEDY, use_tqdm=lambda **options: bars.append(Bar(**options)) or bars[0])
    [bar] = bars
    assert (bar.total, bar.count, bar.is_closed) == (6, 6, True)
    assert "output" in bar.text
    assert capfd.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY)
    assert "Processed prompts: 100%" in capfd.readouterr().err


def test_a_batch_that_is_interrupted_leaves_no_request(llm):
    long = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    each = [SamplingParams(temperature=0, max_tokens=1), *[long] * 9]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            ["Ask"] * 10, each, use_tqdm=lambda **options: Bar(**options, error=KeyboardInterrupt)
        )
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 6
    after = metrics_of(llm)
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["request_success abort"] > 0


def test_speculation_is_steered_between_batches(llm):
    def num_drafts():
        before = metrics_of(llm)["spec_decode_num_drafts"]
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        return metrics_of(llm)["spec_decode_num_drafts"] - before

    assert num_drafts() > 0
    assert llm.set_speculation(mode="off").mode == "off"
    assert num_drafts() == 0
    assert llm.set_speculation(mode="auto", threshold=8, num_speculative_tokens=1).threshold == 8
    assert num_drafts() > 0
    assert llm.speculation.num_speculative_tokens == 1
    with pytest.raises(InvalidValueError, match="method is 'suffix'; it must be what is loaded"):
        llm.set_speculation(method="suffix")
    with pytest.raises(InvalidValueError, match="mode is 'fast'"):
        llm.set_speculation(mode="fast")
    llm.set_speculation(num_speculative_tokens=3)


def test_set_speculation_fails_without_speculation(plain):
    assert plain.speculation is None
    with pytest.raises(InvalidValueError, match="mode is 'on'; it must be left out"):
        plain.set_speculation(mode="on")


def test_defaults_are_the_models(llm):
    assert llm.get_default_sampling_params().temperature == 1.0


async def test_llm_works_inside_an_event_loop(llm, plain):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == tokens(plain.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_disable_log_stats(tiny_model_dir, caplog):
    caplog.set_level("INFO", "specdec.llm")
    for is_disabled in (True, False):
        with LLM(**arguments(tiny_model_dir, disable_log_stats=is_disabled)) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        records = (line for line in caplog.records if line.name.startswith("specdec.llm"))
        lines = [line.getMessage() for line in records]
        assert len(lines) == (0 if is_disabled else 1)
    assert "acceptance rate" in lines[0]


def test_metric_prefix(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir, metric_prefix="vllm:")) as llm:
        names = {metric.name for metric in llm.get_metrics()}
    assert {"vllm:spec_decode_num_drafts", "vllm:num_requests_running"} <= names
    assert all(name.startswith("vllm:") for name in names)


def test_metrics_show_how_far_the_profile_of_the_start_was_off(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir, speculative_config={"method": "ngram"})) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        metrics = llm.get_metrics()
    measured, profiled = (
        {tuple(each.labels.items()): each.value for each in metrics if each.name == name}
        for name in ("specdec:decode_step_seconds", "specdec:decode_step_profiled_seconds")
    )
    assert measured.keys() == profiled.keys() != set()
    assert min(*measured.values(), *profiled.values()) > 0


def test_speculation_is_on_by_default(tiny_model_dir):
    values = arguments(tiny_model_dir)
    del values["speculative_config"]
    with LLM(**values) as llm:
        assert llm.speculation.mode == "auto"


def test_predicted_output_is_drafted_and_changes_no_token(llm, plain):
    [before] = plain.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    options = SpeculationOptions(prediction=before.outputs[0].text)
    params = replace(GREEDY, speculation=options)
    [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert output.outputs[0].token_ids == before.outputs[0].token_ids
    assert output.prediction.num_accepted_tokens > 0
    assert output.prediction.num_drafts <= output.speculation.num_drafts


def test_outputs_show_which_tokens_were_drafted(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        [choice] = output.outputs
        texts = token_texts(choice.text, choice.text_lengths)
        assert len(texts) == len(choice.is_drafted) == len(choice.token_ids)
        assert sum(choice.is_drafted) == output.speculation.num_accepted_tokens
    assert any(any(output.outputs[0].is_drafted) for output in outputs)
    page = outputs._repr_html_()
    assert page.count("<div class='text'") == len(PROMPTS)
    assert page.count("<mark title='drafted'>") == sum(
        bool(text) and is_drafted
        for output in outputs
        for text, is_drafted in zip(
            token_texts(output.outputs[0].text, output.outputs[0].text_lengths),
            output.outputs[0].is_drafted,
            strict=True,
        )
    )
    assert isinstance(outputs, list)
    assert outputs[0]._repr_html_().count("<div class='text'") == 1
