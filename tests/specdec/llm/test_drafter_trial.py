"""Step times of drafters: a head costs more than a lookup, and a draft model too."""

from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm import drafter_trial
from tests.specdec.heads import fitted_medusa_dir


def test_each_kind_of_drafter_is_measured(tiny_model_dir, tmp_path, monkeypatch):
    measured = []
    real = drafter_trial.step_costs

    def step_costs(config):
        measured.append(config.speculative_config.method)
        return real(config)

    monkeypatch.setattr(drafter_trial, "step_costs", step_costs)
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))])
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "max_model_len": 128}
    config = LLMConfig(str(tiny_model_dir), kernels="torch", speculative_config=None, **limits)
    tables = drafter_trial.measure(
        config,
        {
            "short": SpeculativeConfig.of("ngram", 1),
            "long": SpeculativeConfig.of("suffix", 4),
            "head": SpeculativeConfig.of("medusa", 3, model=str(head)),
            "model": SpeculativeConfig.of("draft_model", 2),
        },
    )
    assert measured == ["suffix", "medusa", "draft_model"]
    assert tables["short"] is tables["long"]
    assert tables["long"].draft_tokens == (0, 1, 2, 4)
    assert tables["head"].draft_tokens == (0, 1, 3)
    assert tables["model"].draft_tokens == (0, 1, 2)
    # The model drafts for itself, one token after the other.
    own = tables["model"]
    assert own.step_s(1, 2) - own.step_s(1, 0) > own.step_s(1, 0)
