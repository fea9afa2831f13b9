"""Streams of a service side by side, half of them sampled."""

from concurrent.futures import ThreadPoolExecutor

from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

NUM_STREAMS = 8


class Streams:
    """Streams of `max_tokens` tokens each, which a test makes long enough to interrupt."""

    def __init__(self, max_tokens):
        self.max_tokens = max_tokens

    def params(self, index, **options):
        """Return the parameters of a stream; options: of its speculation."""
        return SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            speculation=SpeculationOptions(**options),
        )

    def run(self, service, index, has_started=None, **options):
        """Run one stream and return its tokens; release `has_started` at the first ones."""
        token_ids = []
        with Client(service.grpc_address, timeout_s=240) as client:
            params = self.params(index, **options)
            for chunk in client.generate_stream(f"The river {index}", params):
                if has_started is not None and not token_ids:
                    has_started.release()
                token_ids.extend(chunk.token_ids)
        return token_ids

    def run_all(self, service, count=NUM_STREAMS, **options):
        """Run the first `count` streams at the same time; return the tokens of each."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda i: self.run(service, i, **options), range(count)))
