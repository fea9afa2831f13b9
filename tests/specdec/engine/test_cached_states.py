# Modules: specdec.sequences.state_snapshots
"""The cost of a prompt of which a snapshot of states and the KV before it are cached."""

import random
import time

import pytest

from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
def test_a_cached_prefix_of_2000_tokens_costs_little(tmp_path, family):
    """Prints the share of the CPU time of computing it: 2.6 and 4.2 % on an idle machine."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 4096}
    save_family(tmp_path, family, **sizes)
    train_tokenizer(383).save_pretrained(tmp_path)
    pool = {"num_blocks": 1000, "block_size": 16, "num_snapshots": 31, "snapshot_interval": 32}
    limits = {"max_model_len": 2100, "max_num_batched_tokens": 256}
    engine = local_engine(tmp_path, engine_config(0, keeps_guesses=True, **pool, **limits))

    def seconds(name, prompt):
        start = time.process_time()
        tokens_by(engine, [request(name, prompt, max_tokens=1)])
        return time.process_time() - start

    generator, shares = random.Random(1), []
    for place in range(5):
        prompt = [generator.randrange(3, 383) for _ in range(2000)]
        whole = seconds(f"a{place}", prompt)
        shares.append(seconds(f"b{place}", [*prompt, *range(10, 20)]) / whole)
    assert engine.stats().counts.num_cached_tokens == 5 * 1984
    print(f"{family}: {sorted(shares)[2]:.1%} of computing the prefix")
