"""Replays outputs by transformers' model: a second implementation of the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specdec.config.llm import LLMConfig
from specdec.engine.receipts.model import receipt_model
from specdec.engine.requests.replays import with_replay
from specdec.engine.requests.sampling_resolver import resolve
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.sampling.replay import OutputReplay
from specdec.sampling.vocab_shard import VocabShard
from specdec.sequences.sequence import EngineRequest
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.text.grammar.matcher import Grammar
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.messages import Logprobs
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import Replay


class TransformersReplayer:
    """See Replayer."""

    def __init__(self, directory: Path, config: LLMConfig) -> None:
        """config: of the model, on a CPU.

        Raises InvalidValueError for settings of ours alone, and UnsupportedModelError.
        """
        for name, value in (("quantization", "none"), ("kv_cache_dtype", "auto")):
            if getattr(config, name) != value:
                limit = f"{value} for transformers, which has no counterpart"
                raise InvalidValueError(name, getattr(config, name), limit)
        if config.hf_overrides is not None:
            raise InvalidValueError("hf_overrides", config.hf_overrides, "none for transformers")
        self.model = ModelConfig.from_directory(directory, config.model_options)
        self.tokenizer = Tokenizer(directory)
        max_model_len = config.max_model_len or self.model.max_position_embeddings
        self.receipt_model = receipt_model(config, directory, self.model, max_model_len)
        dtype = getattr(torch, config.resolved_dtype)
        try:
            self._network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        except (ImportError, OSError, ValueError) as error:
            raise UnsupportedModelError(f"transformers cannot load it: {error}") from error

    def grammar(self, spec: StructuredOutput, num_sequences: int) -> Grammar:
        """See Replayer."""
        compiler = GrammarCompiler(self.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
        try:
            return compiler.compile(spec, num_sequences)
        finally:
            compiler.close()

    @torch.inference_mode()
    def replay(self, request: EngineRequest, replay: Replay) -> Logprobs:
        """See Replayer."""
        params, output = request.params, replay.token_ids
        rules = resolve(params, request.seed, self.model, self.tokenizer)
        rules = with_replay(rules, replace(request, replay=replay))
        tokens = torch.tensor([[*request.prompt_token_ids, *output[:-1]]])
        logits = self._network(tokens, use_cache=False, logits_to_keep=len(output)).logits[0]
        vocab = range(self.model.vocab_size)
        shard = VocabShard(TensorParallelGroup(), 0, len(vocab))
        compared = OutputReplay(rules, request.prompt_token_ids, vocab)
        return compared.compare(logits[:, : len(vocab)].float(), 0, shard)
