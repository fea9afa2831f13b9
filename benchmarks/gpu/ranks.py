"""Two ranks against one: their tokens, graphs against operators, and what a sum over them costs.

Each rank is a process with a GPU. Their sums are in one shot over symmetric memory where NVLink
joins the GPUs, and NCCL's otherwise; the first are compared with the second, and with sums of
gathered operands in the order of the ranks.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu.parts import Context, PartSkippedError, Result, share_differing
from benchmarks.gpu_steps import synchronize
from benchmarks.tiny_model import write_tiny_llama
from specdec.config.engine import EngineConfig
from specdec.kernels.collectives import Collectives, OneShotCollectives, OrderedCollectives
from specdec.kernels.tensor_parallel import Rendezvous, TensorParallelGroup
from specdec.models.weights.checkpoint import CPU
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import RankModel, load_target
from specdec.worker.device.step_graphs import CudaGraphs

_NUM_RANKS = 2
_TIMEOUT = timedelta(seconds=60)
_NUM_SEQS, _NUM_TOKENS, _PROMPT_TOKENS, _BLOCK_SIZE = 8, 24, 20, 16
_MAX_DIFFERING = 1 / 8
_KIB = 2**10
_SUM_BYTES = (8 * _KIB, 64 * _KIB, 256 * _KIB, 1024 * _KIB)
_SUMS_IN_GRAPH = 50


@dataclass(frozen=True)
class _Rank:
    """A rank to run. device_type: cuda, with a GPU for each; or cpu, for a test."""

    rank: int
    device_type: str
    directory: Path
    model: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.device_type == "cuda" else CPU


def compare_ranks(context: Context) -> Result:
    """Run one rank and two; compare their tokens, and measure sums. Needs two GPUs."""
    num_gpus = torch.cuda.device_count() if context.is_gpu else 0
    if num_gpus < _NUM_RANKS and not context.is_small:
        raise PartSkippedError(f"needs {_NUM_RANKS} GPUs, of which {num_gpus} are here")
    directory = context.directory / "ranks"
    model = write_tiny_llama(directory / "model")
    ranks = [_Rank(rank, context.device.type, directory, model) for rank in range(_NUM_RANKS)]
    first, second = _run(ranks)
    differing = {
        "one rank, operators": share_differing(first["alone"], first["operators"]),
        "operators, graphs": share_differing(first["operators"], first["graphs"]),
        "first rank, second": share_differing(first["graphs"], second["graphs"]),
    }
    is_equal = first["graphs"] == second["graphs"]
    has_bits = all(each["differing_bits"] == 0 for each in first["sums"])
    return {
        "passed": is_equal and has_bits and max(differing.values()) <= _MAX_DIFFERING,
        "differing": differing,
        "exchange": first["exchange"],
        "sums": first["sums"],
    }


def _run(ranks: Sequence[_Rank]) -> list[Result]:
    """Run ranks in processes; return the result of each, or raise RuntimeError for the first."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in ranks]
    processes = [
        spawn.Process(target=_main, args=(rank, sender))
        for rank, (_, sender) in zip(ranks, pipes, strict=True)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        return [_received(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()


def _received(rank: int, receiver: Connection) -> Result:
    try:
        result: Result = receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"rank {rank} has ended") from error
    if "error" in result:
        raise RuntimeError(f"rank {rank}: {result['error']}")
    return result


def _main(rank: _Rank, sender: Connection) -> None:
    try:
        sender.send(_result(rank))
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"})


def _result(rank: _Rank) -> Result:
    """Return the tokens of one rank and of this one of two, and the costs of sums."""
    if rank.device_type == "cuda":
        torch.cuda.set_device(rank.device)
    alone = _tokens(rank, TensorParallelGroup(), enforce_eager=False)
    group = Rendezvous(rank.rank, _NUM_RANKS, rank.device_type, rank.directory, _TIMEOUT).join()
    return {
        "alone": alone,
        "operators": _tokens(rank, group, enforce_eager=True),
        "graphs": _tokens(rank, group, enforce_eager=False),
        "exchange": group.describe(),
        "sums": _sums(group.collectives, rank.device),
    }


def _tokens(rank: _Rank, group: TensorParallelGroup, *, enforce_eager: bool) -> list[list[int]]:
    """Return the tokens of sequences, half of which are greedy."""
    config = EngineConfig(
        max_model_len=_PROMPT_TOKENS + _NUM_TOKENS,
        num_blocks=_NUM_SEQS * _num_blocks(),
        block_size=_BLOCK_SIZE,
        max_num_seqs=_NUM_SEQS,
        max_num_batched_tokens=_NUM_SEQS * _PROMPT_TOKENS,
        enforce_eager=enforce_eager,
    )
    runner = load_target(RankModel(rank.model, "float32", config, device=rank.device), group)
    step, tokens = _prompts(), [list[int]() for _ in range(_NUM_SEQS)]
    for index in range(_NUM_TOKENS):
        for row in runner.execute(step).rows:
            tokens[row.seq_id] += row.token_ids
        rows = [
            StepRow(seq_id, _PROMPT_TOKENS + index, (own[-1],), 0, samples=True)
            for seq_id, own in enumerate(tokens)
        ]
        step = StepInput(index + 1, (), (), (), tuple(rows))
    runner.close()
    return tokens


def _prompts() -> StepInput:
    """Return the first step: prompts of random bytes."""
    generator, count = torch.Generator().manual_seed(0), _num_blocks()
    prompts = torch.randint(2, 258, (_NUM_SEQS, _PROMPT_TOKENS), generator=generator).tolist()
    rules = [
        SamplingRules(temperature=0.8 * (seq_id % 2), top_p=0.9, seed=seq_id)
        for seq_id in range(_NUM_SEQS)
    ]
    return StepInput(
        0,
        (),
        tuple(SequenceAdmission(each, _PROMPT_TOKENS, rules[each]) for each in range(_NUM_SEQS)),
        tuple(
            BlockTableDelta(each, 0, tuple(range(each * count, (each + 1) * count)))
            for each in range(_NUM_SEQS)
        ),
        tuple(StepRow(each, 0, tuple(prompts[each]), 0, True) for each in range(_NUM_SEQS)),
    )


def _num_blocks() -> int:
    """Return the blocks of a sequence."""
    return -(-(_PROMPT_TOKENS + _NUM_TOKENS) // _BLOCK_SIZE)


def _sums(collectives: Collectives | None, device: torch.device) -> list[Result]:
    """Return the time of sums by size, in one shot and by NCCL; none where NCCL sums all."""
    if not isinstance(collectives, OneShotCollectives):
        return []
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": num_bytes,
            "differing_bits": _differing_bits(collectives, device, dtype, num_bytes),
            "one_shot_us": _time_us(collectives, device, dtype, num_bytes),
            "nccl_us": _time_us(collectives.others, device, dtype, num_bytes),
        }
        for dtype in (torch.bfloat16, torch.float32)
        for num_bytes in _SUM_BYTES
    ]


def _differing_bits(
    collectives: OneShotCollectives, device: torch.device, dtype: torch.dtype, num_bytes: int
) -> int:
    """Return how many sums in one shot differ from those of gathered operands in order."""
    own = torch.randn(num_bytes // dtype.itemsize, device=device).to(dtype)
    in_order = own.clone()
    collectives.all_reduce(own)
    OrderedCollectives(collectives.others).all_reduce(in_order)
    return int((own != in_order).sum())


def _time_us(
    collectives: Collectives, device: torch.device, dtype: torch.dtype, num_bytes: int
) -> float:
    """Return the microseconds of a sum, of many in a row as a graph."""
    tensor = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)

    def sums() -> None:
        for _ in range(_SUMS_IN_GRAPH):
            collectives.all_reduce(tensor)

    replay = CudaGraphs(device).capture(sums) if device.type == "cuda" else sums
    replay()
    synchronize(device)
    began_at_s = time.perf_counter()
    replay()
    synchronize(device)
    return (time.perf_counter() - began_at_s) / _SUMS_IN_GRAPH * 1e6
