"""The real engine on the tiny model: no drafting method changes a token.

In every run sequences are preempted and prompts are chunked. Each prompt runs twice: the second
time the prefix cache has it, and suffix decoding has its output. `test_head_matrix.py` has every
length, batch and size of heads.
"""

from functools import cache, partial

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftVocabulary, make_proposer
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles
from tests.specdec.attention_heads import MARKOV_VARIANTS, fitted_head_dir
from tests.specdec.engines import draft_model, engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.tiny import disturbed_llama_dir, shuffled_llama_dir, tiny_llama_dir

METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "suffix, eager": {
        "method": "suffix",
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.0,
    },
    "lookahead": {"method": "lookahead"},
    "draft_model": {"method": "draft_model"},
    "other vocabulary": {"method": "draft_model", "model": "of another tokenizer"},
    "ngram first": {"method": "draft_model", "first": "ngram"},
    "suffix first": {"method": "draft_model", "first": "suffix"},
    "ngram last": {"method": "draft_model", "fallback": "ngram"},
    "all": {"method": "draft_model", "first": "ngram", "fallback": "suffix"},
    "medusa": {"method": "medusa", "model": "fitted"},
    "ngram, medusa, suffix": {
        "method": "medusa",
        "model": "fitted",
        "first": "ngram",
        "fallback": "suffix",
    },
    "suffix, medusa": {"method": "suffix", "fallback": "medusa", "model": "fitted"},
    "budget": {"method": "draft_model", "first": "ngram", "batch_budget": True},
    "budget, medusa": {"method": "medusa", "model": "fitted", "batch_budget": True},
    "budget, suffix": {"method": "suffix", "first": "ngram", "batch_budget": True},
    "model last": {"method": "suffix", "fallback": "draft_model"},
    "lookahead last": {"method": "draft_model", "first": "ngram", "fallback": "lookahead"},
    "lookahead first": {"method": "ngram", "first": "lookahead", "fallback": "suffix"},
    **{method: {"method": method, "model": "fitted"} for method in HEADS if method != "medusa"},
    "ngram trees": {"method": "ngram", "prompt_lookup_min": 1, "num_draft_tree_tokens": 12},
    "suffix trees": {
        "method": "suffix",
        "num_draft_tree_tokens": 16,
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.0,
    },
    "suffix trees first": {
        "method": "draft_model",
        "first": "suffix",
        "num_draft_tree_tokens": 10,
    },
    "suffix trees, eagle3": {
        "method": "eagle3",
        "model": "fitted",
        "first": "suffix",
        "num_draft_tree_tokens": 10,
    },
    "suffix trees, medusa": {
        "method": "medusa",
        "model": "fitted",
        "first": "suffix",
        "num_draft_tree_tokens": 10,
    },
}
TREES_OF_HEADS = {
    f"{method} trees": {"method": method, "model": "fitted", "num_draft_tree_tokens": 12}
    for method in HEADS
}
METHODS |= TREES_OF_HEADS
METHODS |= {
    f"{name}{suffix}": {"method": "dspark", "model": name, **keys}
    for name in MARKOV_VARIANTS
    for suffix, keys in (("", {}), (" trees", {"num_draft_tree_tokens": 12}))
}
# Combinations whose parts and order others of `make test` have.
SLOW_COMBINATIONS = ("ngram first", "suffix first", "suffix, medusa", "budget, suffix")
SLOW_COMBINATIONS += ("lookahead first", "suffix trees, medusa", "budget", "suffix trees first")
QUICK_METHODS = [
    pytest.param(method, marks=pytest.mark.slow)
    if method in ("p_eagle", "hydra", "dflash", "dspark", *SLOW_COMBINATIONS, *TREES_OF_HEADS)
    else method
    for method in METHODS
]
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8}


class DraftDirs(dict):
    """Directories of models by method; heads are fitted to the target when first used."""

    def __init__(self, target_dir, new_dir, **models):
        super().__init__(models)
        self.target_dir, self.new_dir = target_dir, new_dir

    def __missing__(self, method):
        texts = list(texts_of(self.target_dir))
        write = HEADS.get(method, partial(fitted_head_dir, method))
        self[method] = write(self.target_dir, self.new_dir(method.replace(" ", "-")), texts)
        return self[method]


@pytest.fixture(scope="module")
def draft_dirs(tiny_model_dir, tmp_path_factory):
    """Return a model that rarely agrees with the target, one that mostly does, the latter with
    permuted token ids, and draft heads that sometimes do."""
    new_dir = tmp_path_factory.mktemp
    other = tiny_llama_dir(new_dir("other"), layers=1, seed=3)
    near = disturbed_llama_dir(tiny_model_dir, new_dir("near"))
    models = {"other": other, "draft_model": near}
    models["other vocabulary"] = shuffled_llama_dir(near, new_dir("shuffled"))
    return DraftDirs(tiny_model_dir, new_dir, **models)


def texts_of(directory):
    """Yield the prompts with their outputs, which the heads are fitted to."""
    for temperature in (0.0, 0.8):
        outputs = reference(directory, temperature)
        for each in requests():
            yield [*each.prompt, *outputs[each.request_id]]


def requests(**params):
    prompts = [
        [(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * i) for i in (0, 1, 2, 4, 6, 7)
    ]
    return [request(f"r{i}", prompt, seed=i, **params) for i, prompt in enumerate(prompts)]


def engine_for(directory, draft_dirs, method, k, group=None, kernels="auto", **changes):
    speculation = SpeculativeConfig.of(num_speculative_tokens=k, **METHODS[method])
    model, head = None, None
    if speculation.head is not None:
        name, model_name = speculation.head.name, METHODS[method]["model"]
        head_dir = draft_dirs[name if model_name == "fitted" else model_name]
        head = HeadFiles(head_dir, method=name)
    elif speculation.draft_model is not None:
        draft_dir = draft_dirs.get(method, draft_dirs["other"])
        vocabulary = DraftVocabulary.between(draft_dir, directory)
        assert (vocabulary.draft is not None) == (method == "other vocabulary")
        # Shorter than the longest text.
        model = draft_model(draft_dir, group, vocabulary=vocabulary, max_model_len=90)
    config = engine_config(speculation=speculation, **{"num_blocks": 60, **changes})
    proposer = make_proposer(speculation, model)
    policy = SpeculationPolicy(
        SpeculationControl("on", 32, k),
        clock=lambda: 0.0,
        num_tree_tokens=speculation.num_draft_tree_tokens,
    )
    return local_engine(directory, config, group, proposer, policy, head=head, kernels=kernels)


@cache
def reference(directory, temperature):
    return tokens_by(local_engine(directory, engine_config(0)), requests(temperature=temperature))


def prepare(directory, draft_dirs, method, sampling):
    """Compute what several ranks use, before they start."""
    reference(directory, **sampling)
    for head in (HEADS | MARKOV_VARIANTS).keys() & METHODS[method].values():
        assert draft_dirs[head].is_dir()


def check(directory, draft_dirs, method, sampling, k, group=None, batch_size=8, kernels="auto"):
    """Run the requests twice in opposite order; prefixes and outputs are cached the second time."""
    changes = {"max_num_seqs": batch_size, "kernels": kernels}
    engine = engine_for(directory, draft_dirs, method, k, group, **changes)
    for order in (1, -1):
        assert tokens_by(engine, requests(**sampling)[::order]) == reference(directory, **sampling)
    stats = engine.stats()
    assert stats.counts.num_prefill_chunks > 0
    assert stats.counts.num_cached_tokens > 0
    assert (stats.counts.num_preemptions > 0) == (batch_size == 8)
    drafts = stats.counts.speculation
    assert 0 < drafts.num_accepted_tokens <= drafts.num_draft_tokens
    assert k == 1 or drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("method", QUICK_METHODS)
def test_tokens_are_those_without_speculation(tiny_model_dir, draft_dirs, method):
    check(tiny_model_dir, draft_dirs, method, SAMPLED, k=3)


@pytest.mark.parametrize("method", ["suffix", "lookahead", "other vocabulary", "all"])
def test_greedy_tokens_are_those_without_speculation(tiny_model_dir, draft_dirs, method):
    check(tiny_model_dir, draft_dirs, method, GREEDY, k=5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [method for method in METHODS if method not in HEADS])
def test_every_length_batch_and_size(
    tiny_model_dir, draft_dirs, method, sampling, k, batch_size, size
):
    prepare(tiny_model_dir, draft_dirs, method, sampling)
    run_ranks(
        size,
        lambda group: check(tiny_model_dir, draft_dirs, method, sampling, k, group, batch_size),
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("method", TREES_OF_HEADS)
def test_trees_of_heads_on_the_torch_decoder(tiny_model_dir, draft_dirs, method, k, batch_size):
    changes = {"batch_size": batch_size, "kernels": "torch"}
    check(tiny_model_dir, draft_dirs, method, SAMPLED, k, **changes)


@pytest.mark.parametrize(
    "method",
    [
        "all",
        "eagle3 trees",
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ("lookahead", "medusa", "eagle3")
        ),
    ],
)
def test_two_ranks_agree(tiny_model_dir, draft_dirs, method):
    prepare(tiny_model_dir, draft_dirs, method, SAMPLED)
    run_ranks(2, lambda group: check(tiny_model_dir, draft_dirs, method, SAMPLED, 5, group))


@pytest.mark.parametrize("method", ["suffix", "lookahead", "all", "medusa", "mtp", "mtp trees"])
def test_tokens_are_the_same_while_speculation_is_toggled(tiny_model_dir, draft_dirs, method):
    engine = engine_for(tiny_model_dir, draft_dirs, method, 3)
    generated = {each.request_id: [] for each in requests(**SAMPLED)}
    for each in requests(**SAMPLED):
        engine.add(each)
    step = 0
    while engine.has_work:
        mode = "on" if step // 4 % 2 else "off"
        engine.set_speculation(SpeculationControl(mode, 32, 3))
        for output in engine.step():
            generated[output.request_id].extend(output.token_ids)
        step += 1
    assert generated == reference(tiny_model_dir, **SAMPLED)
    assert engine.stats().counts.speculation.num_drafts > 0


def test_suffix_decoding_drafts_earlier_outputs(tiny_model_dir):
    """With the whole output known, nearly every draft is right, up to the configured factor."""
    engine = engine_for(tiny_model_dir, None, "suffix, eager", 5, num_blocks=400)
    tokens_by(engine, requests(**SAMPLED))
    first = engine.stats()
    tokens_by(engine, requests(**SAMPLED))
    second = engine.stats()
    num_steps = second.counts.num_steps - first.counts.num_steps
    assert num_steps < 0.6 * first.counts.num_steps


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_request_may_choose_a_loaded_method(tiny_model_dir, draft_dirs, method):
    engine = engine_for(tiny_model_dir, draft_dirs, "ngram first", 3, num_blocks=400)
    options = SpeculationOptions(method=method)
    generated = tokens_by(engine, requests(speculation=options, **SAMPLED))
    assert generated == reference(tiny_model_dir, **SAMPLED)
    assert engine.stats().counts.speculation.num_drafts > 0
