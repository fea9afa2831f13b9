"""Mistakes in the files of models, drafters and adapters, with the words of their errors.

A mistake is a function that gets a `Place` to write files to, and returns the arguments.
"""

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.specdec.adapters import adapter_dir
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.models.tiny_gguf import write_gguf


@dataclass(frozen=True)
class Place:
    """Sources and a directory of one mistake. narrow: another model with other sizes."""

    tiny: Path
    sharded: Path
    narrow: Path
    tmp: Path

    def copy(self, source=None, name="model"):
        """Copy a model, by hard links where a file is not changed."""
        directory = self.tmp / name
        shutil.copytree(source or self.tiny, directory)
        return directory

    def config(self, directory, **keys):
        """Set keys of config.json; None removes one."""
        path = directory / "config.json"
        fields = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        return directory


MISTAKES = {}
"""The words of the error, by mistake."""


def mistake(words):
    """Add a mistake to the table."""

    def add(function):
        MISTAKES[function] = words
        return function

    return add


def shortened(path, num_bytes):
    data = path.read_bytes()
    path.write_bytes(data[:num_bytes])


def drafting(**keys):
    return "--speculative-config", json.dumps(keys)


# files of the model


@mistake(r"no config\.json")
def no_config(place):
    model = place.copy()
    (model / "config.json").unlink()
    return [model]


@mistake(r"no config\.json")
def an_empty_directory(place):
    (place.tmp / "model").mkdir()
    return [place.tmp / "model"]


@mistake(r"config\.json is not valid JSON")
def a_config_that_is_cut(place):
    model = place.copy()
    shortened(model / "config.json", 40)
    return [model]


@mistake(r"architecture BloomForCausalLM is not supported")
def another_architecture(place):
    return [place.config(place.copy(), architectures=["BloomForCausalLM"], model_type="bloom")]


@mistake(r"model\.safetensors has \d+ bytes, and its header describes \d+: ")
def cut_weights(place):
    model = place.copy()
    path = model / "model.safetensors"
    shortened(path, path.stat().st_size - 1000)
    return [model]


@mistake(r"\.safetensors has \d+ bytes, and its header describes \d+: ")
def a_cut_shard(place):
    model = place.copy(place.sharded)
    path = sorted(model.glob("*.safetensors"))[-1]
    shortened(path, path.stat().st_size // 2)
    return [model]


@mistake(r"safetensors: it is no safetensors file, or its header exceeds 100,000,000 bytes")
def weights_of_a_pointer_file(place, content=b"version https://git-lfs.github.com/spec/v1\n"):
    model = place.copy()
    (model / "model.safetensors").write_bytes(content)
    return [model]


@mistake(r"safetensors: it is no safetensors file, or its header exceeds 100,000,000 bytes")
def weights_of_zeros(place):
    return weights_of_a_pointer_file(place, bytes(1000))


@mistake(r"safetensors: it has 40 bytes, and its header would have \d+: it was not copied")
def weights_that_end_in_their_header(place):
    model = place.copy()
    shortened(model / "model.safetensors", 40)
    return [model]


@mistake(r"safetensors: it has 7 bytes, and its header would have 0: it was not copied")
def weights_of_an_interrupted_download(place):
    model = place.copy()
    shortened(model / "model.safetensors", 7)
    return [model]


@mistake(r"index\.json names model-00002-of-\d+\.safetensors, which does not exist")
def a_missing_shard(place):
    model = place.copy(place.sharded)
    sorted(model.glob("*.safetensors"))[1].unlink()
    return [model]


@mistake(r"has no weights in safetensors")
def no_weights(place):
    model = place.copy()
    (model / "model.safetensors").unlink()
    return [model]


@mistake(r"the checkpoint has no tensor model\.layers\.1\.mlp\.up_proj\.weight")
def a_missing_tensor(place):
    model = place.copy()
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return [model]


@mistake(r"has shape \[.*\]; config\.json requires \[")
def weights_of_other_sizes(place):
    model = place.copy()
    shutil.copy(place.narrow / "model.safetensors", model)
    return [model]


@mistake(r"has no tokenizer: neither tokenizer\.json nor")
def no_tokenizer(place):
    model = place.copy()
    for path in model.glob("tokenizer*"):
        path.unlink()
    return [model]


@mistake(r"tokenizer\.json is not valid JSON|invalid files of a tokenizer")
def a_broken_tokenizer(place):
    model = place.copy()
    shortened(model / "tokenizer.json", 200)
    return [model]


@mistake(r"tokenizer\.json holds no tokenizer: ")
def a_tokenizer_of_another_kind(place):
    model = place.copy()
    (model / "tokenizer.json").write_text('{"model": {"type": "Other"}}')
    return [model]


@mistake(r"directory")
def a_file_in_place_of_a_directory(place):
    return [place.tiny / "model.safetensors"]


@mistake(r"cannot be read as safetensors: .*Permission denied")
def unreadable_weights(place):
    model = place.copy()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/proc/1/mem")  # not readable even for root
    return [model]


@mistake(r"not found: it must be an alias")
def an_unknown_path(place):
    return [place.tmp / "no-such-model"]


@mistake(r"did you mean 'smollm2-135m-instruct'\?")
def an_unknown_name(place):
    return ["smolm2-135m"]


@mistake(r"there is no directory 'org/model', and the Hub cannot be reached")
def no_hub(place):
    return ["org/model"]


# GGUF


def gguf(place, data):
    path = place.tmp / "model.gguf"
    path.write_bytes(data)
    return [path]


@mistake(r"it does not begin with GGUF")
def a_gguf_of_another_format(place):
    return gguf(place, b"PK\x03\x04" + bytes(100))


@mistake(r"model\.gguf \(24 bytes\) is no whole GGUF file: it ends within its header; it was")
def a_cut_gguf(place):
    return gguf(place, b"GGUF" + struct.pack("<IQQ", 3, 5, 7))


@mistake(r"model\.gguf has \d+ bytes, and its tensor \S+ ends at \d+: ")
def a_gguf_of_cut_weights(place):
    path = place.tmp / "model.gguf"
    write_gguf(place.tiny, path)
    shortened(path, path.stat().st_size * 2 // 3)
    return [path]


# speculation


@mistake(r"speculative_config\.method is 'eagle7'; it must be one of")
def unknown_method(place):
    return [place.tiny, *drafting(method="eagle7")]


@mistake(r"must be a JSON object such as")
def text_that_is_no_json(place):
    return [place.tiny, "--speculative-config", "{method: ngram"]


@mistake(r"did you mean num_speculative_tokens\?")
def unknown_speculation_key(place):
    return [place.tiny, *drafting(method="ngram", num_speculative_token=3)]


@mistake(r"num_speculative_tokens is 99; it must be from 1 to 32")
def too_many_drafts(place):
    return [place.tiny, *drafting(method="ngram", num_speculative_tokens=99)]


@mistake(r"model .*draft.* not found")
def a_missing_draft_model(place):
    return [place.tiny, *drafting(method="draft_model", model=str(place.tmp / "draft"))]


@mistake(r"speculative_config\.model is .*other")
def a_draft_model_of_another_vocabulary(place):
    return [place.tiny, *drafting(method="draft_model", model=str(other_words(place)))]


def other_words(place):
    """Return a model that shares one token with the others."""
    model = place.copy(name="other")
    path = model / "tokenizer.json"
    fields = json.loads(path.read_text())
    vocabulary = fields["model"]["vocab"]
    renamed = {each if each == "a" else f"#{each}#": i for each, i in vocabulary.items()}
    fields["model"] |= {"vocab": renamed, "merges": []}
    fields["added_tokens"] = []
    path.write_text(json.dumps(fields))
    return model


@mistake(r"draft/model\.safetensors has 50000 bytes")
def a_cut_draft_model(place):
    draft = place.copy(name="draft")
    shortened(draft / "model.safetensors", 50_000)
    return [place.tiny, *drafting(method="draft_model", model=str(draft))]


@mistake(r"no config\.json")
def a_head_without_files(place):
    (place.tmp / "head").mkdir()
    return [place.tiny, *drafting(method="eagle3", model=str(place.tmp / "head"))]


def medusa(place, hidden):
    head = place.tmp / "head"
    head.mkdir()
    fields = {"medusa_num_heads": 1, "medusa_num_layers": 1, "hidden_size": hidden}
    (head / "config.json").write_text(json.dumps(fields))
    weights = load_file(place.tiny / "model.safetensors")["model.embed_tokens.weight"]
    square = weights[:hidden, :1].expand(hidden, hidden)
    tensors = {"0.0.linear.weight": square, "0.0.linear.bias": square[0], "0.1.weight": weights}
    tensors["0.1.weight"] = weights[:, :1].expand(383, hidden)
    save_file({k: v.contiguous() for k, v in tensors.items()}, head / "medusa_lm_head.safetensors")
    return head


@mistake(r"is 96; it must be 144, as in the target")
def a_head_of_another_hidden_size(place):
    return [place.tiny, *drafting(method="medusa", model=str(medusa(place, 96)))]


@mistake(r"medusa_lm_head\.safetensors has 60000 bytes")
def a_cut_head(place):
    head = medusa(place, 144)
    shortened(head / "medusa_lm_head.safetensors", 60_000)
    return [place.tiny, *drafting(method="medusa", model=str(head))]


# adapters


def adapters(path):
    return "--enable-lora", "--lora-modules", f"sql={path}"


@mistake(r"adapter .* not found")
def a_missing_adapter(place):
    return [place.tiny, *adapters(place.tmp / "adapter")]


@mistake(r"has no adapter_model\.safetensors")
def an_adapter_without_weights(place):
    adapter = adapter_dir(place.tmp / "adapter", place.tiny)
    (adapter / "adapter_model.safetensors").unlink()
    return [place.tiny, *adapters(adapter)]


@mistake(r"it was made for another model")
def an_adapter_of_another_model(place):
    return [place.tiny, *adapters(adapter_dir(place.tmp / "adapter", place.narrow))]


@mistake(r"has rank 32; it must be at most max_lora_rank \(16\)")
def an_adapter_of_too_high_a_rank(place):
    adapter = adapter_dir(place.tmp / "adapter", place.tiny, rank=32)
    return [place.tiny, *adapters(adapter), "--max-lora-rank", "16"]


@mistake(r"adapter_model\.safetensors has \d+ bytes")
def a_cut_adapter(place):
    adapter = adapter_dir(place.tmp / "adapter", place.tiny)
    path = adapter / "adapter_model.safetensors"
    shortened(path, path.stat().st_size - 100)
    return [place.tiny, *adapters(adapter)]


@mistake(r"model\.layers\.7\.\S+ is not a linear layer of the model")
def an_adapter_of_unknown_layers(place):
    adapter = adapter_dir(place.tmp / "adapter", place.tiny)
    path = adapter / "adapter_model.safetensors"
    deeper = {name.replace("layers.1", "layers.7"): t for name, t in load_file(path).items()}
    save_file(deeper, path)
    return [place.tiny, *adapters(adapter)]


@mistake(r"lora_modules .* enable_lora")
def adapters_that_are_not_enabled(place):
    adapter = adapter_dir(place.tmp / "adapter", place.tiny)
    return [place.tiny, "--lora-modules", f"sql={adapter}"]


def counterpart(path):
    return "--enable-lora", "--lora-modules", json.dumps({"name": "sql", "draft_path": str(path)})


@mistake(r"draft_path .* must be left out: no draft model or head is configured")
def a_counterpart_without_a_drafter(place):
    flags = drafting(method="ngram")
    return [place.tiny, *flags, *counterpart(adapter_dir(place.tmp / "adapter", place.tiny))]


@mistake(r"is updated as .* the model.s weight has shape .* made for another model")
def a_counterpart_of_another_draft_model(place):
    flags = drafting(method="draft_model", model=str(place.tiny))
    return [place.tiny, *flags, *counterpart(adapter_dir(place.tmp / "adapter", place.narrow))]


@mistake(r"is not a linear layer of the draft head's layers, such as blocks\.0\.layers\.0")
def a_counterpart_of_another_head(place):
    head = fitted_medusa_dir(place.tiny, place.tmp / "head", [list(range(3, 20))])
    flags = drafting(method="medusa", model=str(head))
    return [place.tiny, *flags, *counterpart(adapter_dir(place.tmp / "adapter", place.tiny))]
