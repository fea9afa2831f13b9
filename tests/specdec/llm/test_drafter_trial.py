"""Step times of drafters: a head costs more than a lookup, and a draft model too."""

from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm import drafter_trial
from tests.specdec.heads import fitted_medusa_dir

LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "max_model_len": 128}


def drafters(target, directory):
    head = fitted_medusa_dir(target, directory, [list(range(3, 30))])
    return {
        "short": SpeculativeConfig.of("ngram", 1),
        "head": SpeculativeConfig.of("medusa", 3, model=str(head)),
        "model": SpeculativeConfig.of("colocated_draft_model", 2, model=str(target)),
        "long": SpeculativeConfig.of("suffix", 4),
    }


def config_of(directory):
    return LLMConfig(str(directory), kernels="torch", speculative_config=None, **LIMITS)


def test_each_kind_of_drafter_is_measured(tiny_model_dir, tmp_path):
    found = drafters(tiny_model_dir, tmp_path)
    with drafter_trial.loaded(config_of(tiny_model_dir), found) as candidates:
        tables = {tuple(each.names): each.measure() for each in candidates}
    assert list(tables) == [("head",), ("model",), ("short", "long")]
    counts = [each.draft_tokens for each in tables.values()]
    assert counts == [(0, 1, 3), (0, 1, 2), (0, 1, 2, 4)]
    # The model drafts for itself, one token after the other.
    own = tables["model",]
    assert own.step_s(1, 2) - own.step_s(1, 0) > own.step_s(1, 0)


def test_lookups_alone_have_a_target(tiny_model_dir, tmp_path):
    found = {"short": SpeculativeConfig.of("ngram", 1), "long": SpeculativeConfig.of("suffix", 4)}
    with drafter_trial.loaded(config_of(tiny_model_dir), found) as [candidate]:
        assert candidate.names == ["short", "long"]
        assert candidate.measure().draft_tokens == (0, 1, 2, 4)
