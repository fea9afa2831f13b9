"""Generate docs/models.md: the supported architectures, from the registry.

python -m tools.supported_models [check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from specdec.config.engine import DTYPE_BYTES
from specdec.config.kv_cache import FP8_FORMATS
from specdec.config.quantization import CPU_QUANTIZATION_METHODS, GPU_QUANTIZATION_METHODS
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.models.config.families.text_models import TEXT_MODELS
from specdec.models.config.hybrids.families import HYBRIDS
from specdec.models.config.registry import ARCHITECTURES, SAME_DECODERS
from specdec.models.config.rope import SUPPORTED_ROPE_TYPES
from specdec.models.weights.dequantize import SUPPORTED as WEIGHT_FORMATS
from tools.generated_files import run

PAGE = Path("docs/models.md")
_HEAD = """\
# Supported models

Generated from the registry by `make generate`. `specdec models show NAME` reports what would run
a model: its decoder, the memory of each rank, and which drafting methods fit, or why not.

`config.json` names the architecture; without `architectures` its `model_type` decides. The column
*beside Llama* lists what the family adds to a decoder with RMSNorm, grouped KV heads, rotary
embedding and SwiGLU.
"""
_TOKENIZERS = (
    "`tokenizer.json`; `tiktoken.model` of Kimi and Moonlight; with the package `sentencepiece` "
    "also `tokenizer.model`"
)


def page() -> str:
    """Generate the page."""
    parts = (_families(), _decoders(), _by_torch(), _hybrids(), _transformers(), _refused())
    return "\n".join([_HEAD, *chain.from_iterable(parts)]).rstrip() + "\n"


def _families() -> Iterator[str]:
    yield "## Architectures\n"
    rows = [
        (f"`{name}`", f"`{each.model_type}`", ", ".join(each.models), each.notes)
        for name, each in ARCHITECTURES.items()
    ]
    yield _table(("architecture", "`model_type`", "models", "beside Llama"), rows)
    others = ", ".join(f"`{name}` as `{other}`" for name, other in SAME_DECODERS.items())
    yield f"Loaded as another architecture, whose decoder it has: {others}.\n"
    texts = ", ".join(
        f"`{name}` as {' or '.join(f'`{each.architecture}`' for each in whole.texts)}"
        for name, whole in TEXT_MODELS.items()
    )
    yield f"Models that read images too, of which the text model is served alone: {texts}.\n"


def _decoders() -> Iterator[str]:
    yield "## What holds for all of them\n"
    yield _table(
        ("topic", "support"),
        [
            (
                "decoders",
                "the C++ kernels on CPUs; torch on GPUs, with `--kernels torch`, where the kernels "
                "are not available, and for [some families](#by-torch-alone)",
            ),
            ("data types", _names(DTYPE_BYTES)),
            (
                "KV cache",
                "in the data type of the model; 8 bits by `--kv-cache-dtype` "
                f"({_names(FP8_FORMATS)}) on GPUs and with `--kernels torch`",
            ),
            ("quantization on a CPU", _names(CPU_QUANTIZATION_METHODS)),
            ("quantization on a GPU", _names(GPU_QUANTIZATION_METHODS)),
            ("quantized checkpoints", WEIGHT_FORMATS),
            (
                "of these, kept in few bits on a GPU",
                "awq, gptq in 4 bits, fp8, compressed-tensors (4-bit integers, int8, float8); "
                "[the others](gpu-kernels.md#quantized-weights), and all of them elsewhere, are "
                "dequantized by loading",
            ),
            ("tokenizers", _TOKENIZERS),
            ("rotary embeddings", _names(SUPPORTED_ROPE_TYPES)),
            ("tensor parallelism", "any number of ranks up to the number of query heads"),
            (
                "expert parallelism",
                "`--enable-expert-parallel`: the ranks divide a mixture by expert, evenly to "
                "within one, instead of dividing every expert; at most as many ranks as experts",
            ),
            ("drafting methods", _names(METHOD_NAMES)),
        ],
    )
    yield (
        "LongRoPE (`longrope`) has a list of factors for contexts up to the original one and one "
        "for longer contexts. As in vLLM, `--max-model-len` decides for the whole service.\n"
    )


def _by_torch() -> Iterator[str]:
    yield "## By torch alone\n"
    yield (
        "The native decoder has no kernels for these; `--kernels auto` selects torch, and "
        "`--kernels native` is refused with the reason.\n"
    )
    yield _table(
        ("family", "reason", "on a GPU"),
        [
            (
                "Llama 4",
                "chunks of attention, where `--max-model-len` is above `attention_chunk_size`",
                "refused above it",
            ),
            (
                "DeepSeek-V3.2, GLM-5",
                "an indexer that chooses tokens, where `--max-model-len` is above `index_topk`; "
                "the MTP layer drafts without it",
                "refused above it",
            ),
            (
                "Gemma 4",
                "layers of different shapes; without LoRA and `specdec train`",
                "refused",
            ),
        ],
    )


_RECURRENT_SUPPORT = (
    (
        "kernels",
        "native ones and torch on a CPU; those of Triton and torch on a GPU",
    ),
    (
        "prefix cache",
        "up to a snapshot of states ([adr/0045](adr/0045-snapshots-of-states.md))",
    ),
    (
        "drafting",
        "lookups, draft models on their own ranks, and draft heads; the MTP layers of Qwen3-Next "
        "and Qwen 3.5 (`mtp`), not those of Nemotron-H, which are single blocks with a norm each; "
        "any verifier; chains, and on a CPU trees; no `specdec train`",
    ),
    (
        "as draft models",
        "for targets with the same tokenizer; neither ahead of the target "
        "(`async_drafting`) nor in parallel, and without prefix cache; they draft chains",
    ),
    (
        "ranks",
        "at most as many as channels (LFM2, Jamba), key heads (Gated DeltaNet) or heads "
        "(Mamba-2, Kimi Delta Attention)",
    ),
    (
        "names of tensors",
        "those of the published files, and of transformers 5 for Nemotron-H, Granite 4 "
        "and Qwen 3.5; the experts of a layer may be in one tensor",
    ),
    ("deterministic results", "as native kernels always are; not with torch or on a GPU"),
    ("LoRA", "on a CPU, [adapters](lora.md) of any linear layers"),
)


def _hybrids() -> Iterator[str]:
    yield "## Recurrent layers\n"
    names = _names(name for name in HYBRIDS)
    yield (
        f"{names} have layers without keys and values, whose state is updated by each token. Each "
        "rank keeps the state of a sequence at its last known token, and the inputs of the drafts "
        "after it: the next step runs the accepted ones again, and drafts of any acceptance "
        "change no token. `specdec models show` reports their bytes.\n"
    )
    yield _table(("topic", "support"), _RECURRENT_SUPPORT)


def _transformers() -> Iterator[str]:
    yield "## Other architectures, by transformers' code\n"
    yield (
        "An architecture without an entry above runs by transformers' modelling code, with "
        "specdec's paged KV cache and scheduler in place of its attention "
        "([adr/0037](adr/0037-transformers-backend.md)). `--model-impl transformers` does the same "
        "with an architecture of the table, except StableLM, Mistral 4, Llama 4, Gemma 4 and "
        "models with LongRoPE; `--model-impl specdec` refuses others.\n"
    )
    yield (
        "Such a model needs a causal language model in transformers whose attention can be "
        "replaced, such as GPT-2, GPT-NeoX, GPT BigCode, OPT, Phi 1 and 2, Nemotron, Persimmon, "
        "Helium, Ministral, VaultGemma and Aria (text). When it is loaded, each layer is "
        "checked: attention that the KV cache cannot serve is refused.\n"
    )
    yield _table(
        ("topic", "support"),
        [
            ("kernels", "torch; attention by Triton on GPUs"),
            ("data types", f"{_names(DTYPE_BYTES)}; KV in 8 bits as above"),
            (
                "ranks",
                "one, or a divisor of the KV heads where transformers has a plan of linear layers "
                "and of experts, which `--enable-expert-parallel` divides by expert; each rank has "
                "the whole model in host memory while it loads",
            ),
            ("drafting", "lookups and draft models; any verifier; no draft heads"),
            ("quantization, quantized checkpoints, LoRA", "none"),
            (
                "multi-head latent attention",
                "expanded: keys and values of all heads are cached, values padded to the width "
                "of keys",
            ),
        ],
    )


def _refused_families() -> Iterator[str]:
    yield "These are refused by both decoders, the own one and transformers' code:\n"
    yield _table(
        ("family", "reason"),
        [
            (
                "MiMo-V2-Flash (`mimo_v2_flash`)",
                "layers with different numbers of KV heads, and values narrower than keys",
            ),
            (
                "Zamba and Zamba2 (`zamba`, `zamba2`)",
                "blocks of attention that several layers share, which read the embeddings too and "
                "have an adapter for each layer",
            ),
        ],
    )
    yield (
        "A served model reads text only. An image, audio or a file in a request is rejected with "
        "status 400, and the error names its place and type; in the result of a tool call it "
        "becomes a note, as [openai.md](openai.md) describes.\n"
    )


def _refused() -> Iterator[str]:
    yield "## What is refused\n"
    yield (
        "The rest is refused at the start, with the reason in the message: encoder-decoders and "
        "encoders; state-space layers and linear attention of families without an entry, such as "
        "lightning attention (MiniMax-Text-01, MiniMax-M1, Ring-linear), whose constant decays "
        "without a convolution no layer here has; attention with masks that are neither causal nor "
        "a window; models that read images or audio, unless their text model is listed above; "
        "models whose layers are code of their repository, which is never executed.\n"
    )
    yield from _refused_families()
    yield (
        "Before anything is loaded, each tensor of a checkpoint must have the type, the shape and "
        "the number of groups that `config.json` and the description of its quantization give: "
        "`quantization_config`, or the file `hf_quant_config.json`, `quantize_config.json` or "
        "`quant_config.json`. Codes without a description are refused by name. The log names "
        "tensors that nothing reads; an output head beside tied embeddings is used, and alone it "
        "is both.\n"
    )
    yield (
        "`specdec models show DIR` applies these rules to the headers of the files: a line `note` "
        "for what is not used or assumed, a line `fault` for each reason not to load, and exit "
        "code 2.\n"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in (heads, *rows))
    return "\n".join([head, f"|{'---|' * len(heads)}", *body]) + "\n"


def main(arguments: list[str]) -> int:
    """Generate or check the page; return the exit status."""
    return run({PAGE: page}, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
