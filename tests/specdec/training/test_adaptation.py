# Modules: specdec.training.warm_start
"""Training of a served head that is continued, and what it is worth when the traffic changes."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specdec import LLM, SamplingParams
from specdec.training.adaptation import Adaptation, split
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import TRAINED_METHODS, drafter_class
from specdec.training.export import export
from specdec.training.trainer import Data, Trainer
from specdec.training.warm_start import ExportedHead
from specdec.types.errors import UnsupportedModelError
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.llm.models import arguments
from tests.specdec.tiny import TEXT
from tests.specdec.trained import byte_level, trained_llama_dir
from tests.specdec.training.targets import CONFIG, exported


@pytest.mark.parametrize("method", sorted({*TRAINED_METHODS} - {"draft_model"}))
def test_an_exported_head_is_continued_with_its_weights(method, target, samples, tmp_path):
    trainer = exported(method, target, tmp_path / "run", samples)
    head = ExportedHead(trainer.head_directory)
    sizes = {} if method == "eagle3" else {"depth": 3}
    if method in ("dspark", "dflash"):
        sizes["num_layers"] = 1
    if method == "dspark":
        sizes["markov_rank"] = 64
    assert head.settings == {"method": method, **sizes}
    ids = head.token_ids(target.config.vocab_size)
    assert ids == trainer.drafter.token_ids.tolist()
    again = drafter_class(method)(target, torch.tensor(ids), replace(CONFIG, **head.settings))
    head.copy_to(again)
    export(again, tmp_path / "again", "float32", {})
    stored = load_file(trainer.head_directory / "model.safetensors")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert tensor.equal(stored[name]), name


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa"])
def test_with_other_draft_tokens_the_common_rows_are_continued(method, target, samples, tmp_path):
    head = ExportedHead(exported(method, target, tmp_path, samples).head_directory)
    stored = head.token_ids(target.config.vocab_size)
    wanted = torch.arange(0, target.config.vocab_size, 3)
    torch.manual_seed(5)
    drafter = drafter_class(method)(target, wanted, replace(CONFIG, **head.settings))
    before = {name: each.clone() for name, each in drafter.tensors().items()}
    head.copy_to(drafter)
    names = {"lm_head.weight"} | ({"markov_head.markov_w2.weight"} if method == "dspark" else set())
    for name, tensor in drafter.tensors().items():
        if name not in names:
            assert not tensor.is_floating_point() or tensor.equal(head.tensors[name]), name
            continue
        places = {token_id: place for place, token_id in enumerate(stored)}
        common = [row for row, token_id in enumerate(wanted.tolist()) if token_id in places]
        assert tensor[common].equal(
            head.tensors[name][[places[int(wanted[row])] for row in common]]
        )
        others = [row for row in range(len(wanted)) if row not in common]
        fitted = fit(before[name][common], tensor[common], before[name][others])
        torch.testing.assert_close(tensor[others], fitted, rtol=1e-4, atol=1e-5)


def fit(source, result, others):
    """Return what a scale and a shift by column, fitted to pairs of rows, make of other rows."""
    columns = torch.eye(source.shape[1]).repeat(len(source), 1)
    inputs = torch.cat([source.reshape(-1, 1), columns], dim=1).double()
    outputs = result.reshape(-1, 1).double()
    found = torch.linalg.lstsq(inputs, outputs, driver="gelsd").solution.flatten().float()
    return found[0] * others + found[1:]


def test_a_head_that_was_not_trained_here_is_refused(target, samples, tmp_path):
    texts = [each.token_ids for each in samples]
    other = fitted_medusa_dir(target.directory, tmp_path / "head", texts)
    with pytest.raises(UnsupportedModelError, match="cannot be trained further: tensor"):
        Adaptation(target, CONFIG, tmp_path).train(other, samples, lambda progress: None)
    assert not (tmp_path / ".training").exists()


def test_all_answers_to_a_prompt_are_on_one_side():
    samples = [Sample((prompt, 9, 9, answer), 2, 0.0) for prompt in range(500) for answer in (1, 2)]
    train, held_out = split(samples, 0.2, 0)
    assert len(train) + len(held_out) == 1000
    assert 110 <= len(held_out) <= 290, "5 standard deviations of 17.9, whatever the hash"
    assert not {each.token_ids[0] for each in train} & {each.token_ids[0] for each in held_out}
    assert split(samples, 0.2, 0) == (train, held_out)
    assert split(samples, 0.2, 1) != (train, held_out)


def test_a_prompt_keeps_its_side_while_others_come_and_go():
    samples = [Sample((prompt, 9, 9), 2, 0.0) for prompt in range(200)]
    early = split(samples[:120], 0.2, 0)
    late = split(samples[60:], 0.2, 0)
    for first, second in zip(early, late, strict=True):
        assert [each for each in first if each in samples[60:]] == [
            each for each in second if each in samples[:120]
        ]


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_of_two_prompts_one_is_held_out_and_of_one_none(held_out):
    samples = [Sample((prompt, 9, 9, answer), 2, 0.0) for prompt in (3, 4) for answer in (1, 2)]
    assert [len(side) for side in split(samples, held_out, 0)] == [2, 2]
    assert split(samples[:2], held_out, 0) == (samples[:2], [])


def test_a_version_that_is_not_better_does_not_exist(target, samples, tmp_path):
    trainer = exported("medusa", target, tmp_path / "run", samples)
    tiny = replace(CONFIG, learning_rate=1e-9)
    version = Adaptation(target, tiny, tmp_path).train(
        trainer.head_directory, samples, lambda progress: None
    )
    assert (version.directory, version.after) == (None, version.before)
    assert not list(tmp_path.glob("version-*"))


LONGER = replace(
    CONFIG, method="medusa", num_epochs=40, batch_tokens=512, learning_rate=5e-3, patience=20
)
OTHER_TEXT = TEXT.swapcase()[::-1]
"""Another language: other tokens, in another order."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adaptation_to_another_language_raises_acceptance(tmp_path):
    tokenizer = byte_level(TEXT + OTHER_TEXT, 400)
    trained_llama_dir(tmp_path / "target", tokenizer, TEXT + OTHER_TEXT, num_steps=300)
    target = Target(tmp_path / "target", 160, TargetPrecision(kernels="torch"))
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def prompts(text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        starts = range(0, len(ids) - 12, max(1, (len(ids) - 12) // 50))
        return [{"prompt_token_ids": ids[start : start + 8]} for start in starts]

    def answered(llm, asked):
        outputs = llm.generate(asked, params, use_tqdm=False)
        tokens = [(*each.prompt_token_ids, *each.outputs[0].token_ids) for each in outputs]
        return [Sample(each, 8, 0.0) for each in tokens]

    seen, unseen = prompts(OTHER_TEXT)[::2], prompts(OTHER_TEXT)[1::2]
    with LLM(**arguments(target.directory, speculative_config=None)) as llm:
        first, expected = answered(llm, prompts(TEXT)), answered(llm, unseen)
    data = Data(first[5:], first[:5], range(target.config.vocab_size), {})
    trainer = Trainer(LONGER, target, data, tmp_path / "run")
    trainer.run(lambda progress: None)
    head = trainer.head_directory
    speculation = {"model": str(head), "num_speculative_tokens": 3, "policy": "threshold"}
    with LLM(**arguments(target.directory, speculative_config=speculation)) as llm:
        assert answered(llm, unseen) == expected
        samples = answered(llm, seen)
        version = Adaptation(target, LONGER, tmp_path).train(head, samples, lambda progress: None)
        assert version.directory == tmp_path / "version-00001"
        llm.load_drafter(str(version.directory))
        assert answered(llm, unseen) == expected, "the tokens are unchanged"
        before, after = llm.drafter_versions()
    figures = [
        (round(each.acceptance, 3), round(each.speculation.mean_acceptance_length, 2))
        for each in (before, after)
    ]
    print("first tokens accepted, tokens per draft: before, after", figures)
    assert after.acceptance > before.acceptance + 0.1, figures
