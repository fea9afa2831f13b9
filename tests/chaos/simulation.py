"""A random history of an engine: requests, losses, changes and clients, one after the other.

A run is a function of its seed. The target has no model (`HashTarget`), so it takes milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.workers.messages.serialization import (
    decode_output,
    decode_step,
    encode_output,
    encode_step,
)
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.requests.output_streams import OutputStream
from specdec.engine.requests.outputs import Delivery, TargetLostError
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.decode_rows import RepeatedRows
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.errors import SpecdecError, TargetFailedError
from specdec.types.messages import StepInput, StepRow, VerifyOutput
from specdec.types.request import OWN_PROCESS, ThinkingBudget
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams
from tests.chaos.history import CANCELLED, FINISHED, Call, Tokens, violations
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config

EXPIRED = "expired"
SUSPECTED = "CrashingRequestError"
"""Of a sequence that ran alone after two losses, at a third one."""
BLOCK_SIZE = 4
VOCAB_SIZE = 383
MAX_MODEL_LEN = 48
MAX_STEPS_TO_END = 3_000
MARK = (13, 10)
"""Appended where a thinking budget is reached; none of its tokens ends a call."""

Deliver = Callable[[Sequence[EngineOutput]], Sequence[EngineOutput]]
"""Passes on the outputs that a stream has for its client; a test puts a fault in its place."""


class LossyTarget(HashTarget):
    """A target that is lost in its next `begin` or `collect`, as the simulation decides.

    It receives and answers steps as ranks do. num_repeated: those that repeat the one before.

    has_bad_logits: whether the logits of a row with drafts are not numbers, at random.
    """

    def __init__(
        self,
        head: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        has_bad_logits: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(BLOCK_SIZE, VOCAB_SIZE, head)
        self.loses_in: str | None = None
        self.num_repeated = 0
        self._rows: Sequence[StepRow] = ()  # of the last step, as a rank keeps them
        self._has_bad_logits = has_bad_logits

    def begin(self, step: StepInput) -> None:
        if self.loses_in == "begin":
            raise TargetFailedError("lost in begin")
        step = decode_step(encode_step(step), self._rows)
        self._rows = step.rows
        self.num_repeated += isinstance(step.rows, RepeatedRows)
        super().begin(step)
        if self.loses_in == "after begin":
            raise TargetFailedError("lost after the message was sent")

    def collect(self) -> VerifyOutput:
        if self.loses_in == "collect":
            raise TargetFailedError("lost in collect")
        return decode_output(encode_output(self.verified(self.steps.pop(0))))

    def verified(self, step: StepInput) -> VerifyOutput:
        """Return the output of one of up to two steps in flight."""
        later, self.steps = self.steps, [step]
        output = super().collect()
        self.steps = later
        return output

    def _verify(self, context: list[int], row: StepRow) -> tuple[int, ...]:
        if row.num_draft_tokens and self._has_bad_logits():
            return ()
        return super()._verify(context, row)


@dataclass
class Client:
    """A client of one call, which it may resume under another request id."""

    call: Call
    request: EngineRequest
    stream: OutputStream = field(default_factory=lambda: OutputStream("r", None, OWN_PROCESS))

    @property
    def expected(self) -> Tokens:
        return self.call.expected[0]

    def read(self) -> Iterator[EngineOutput]:
        """Return the outputs that its stream has."""
        while self.stream._has_output:
            try:
                self.stream.take().send(None)  # does not wait
            except StopIteration as taken:
                yield taken.value


class Simulation:
    """An engine and its clients. `run` does random events and checks the history of all calls."""

    num_events = 60
    share_without_drafts = 0.5
    """Share of histories that end without drafts, with the longest runs of plain decodes."""

    def __init__(
        self,
        seed: int,
        model: ModelConfig,
        tokenizer: Tokenizer,
        deliver: Deliver = lambda outputs: outputs,
    ) -> None:
        self.random = random.Random(seed)
        self._deliver = deliver
        self._now_s = 0.0
        self._clients: dict[str, Client] = {}  # of open requests, by request id
        self._calls: list[Call] = []
        self._wrong_counts: list[str] = []
        self._reference = self._make_reference()
        self.target = self._make_target()
        self._is_lost = False
        self.num_losses = 0
        self.num_tokens_alone = 0  # of plain decodes, without outputs
        self._num_admitted_before = 0
        self.engine = self._make_engine(model, tokenizer)

    @property
    def num_admitted_ahead(self) -> int:
        """Sequences that all targets so far have admitted by steps begun ahead."""
        return self._num_admitted_before + self.target.num_admitted_ahead

    def run(self) -> list[str]:
        """Return the violations of this history."""
        for _ in range(self.num_events):
            self._event()
            self.engine.check_integrity()
        faults = self._end() + violations(self._calls, {EXPIRED, SUSPECTED})
        return faults + self._wrong_counts

    def committed(self, error: TargetLostError) -> Delivery:
        """Return the outputs to deliver although the step failed; a test drops them."""
        return error.outputs.delivery

    def _end(self) -> list[str]:
        """Let all calls end without further events; return what keeps them from it."""
        if self._is_lost:
            self._recover()
        self.target.loses_in = None
        if self.random.random() < self.share_without_drafts:
            self.engine.set_speculation(SpeculationControl("off", 0, 1))
        for _ in range(MAX_STEPS_TO_END):
            if not self.engine.has_work:
                break
            self._step()
        self._read_streams(share=1.0)
        stats = self.engine.stats()
        faults = ["the engine still has work"] if self.engine.has_work else []
        if stats.num_free_blocks != stats.num_blocks:
            faults.append(f"{stats.num_blocks - stats.num_free_blocks} KV blocks leaked")
        return faults

    def _make_reference(self) -> HashTarget:
        return HashTarget(BLOCK_SIZE, VOCAB_SIZE)

    def _make_target(self) -> LossyTarget:
        return LossyTarget(self._draft, lambda: self.random.random() < 0.01)

    def _make_engine(self, model: ModelConfig, tokenizer: Tokenizer) -> Engine:
        choose = self.random.choice
        speculation = self._make_speculation()
        config = engine_config(
            speculation=speculation,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=choose((12, 16, 30, 100)),
            max_num_seqs=choose((1, 2, 4, 8)),
            max_num_batched_tokens=choose((8, 16, 64)),
            max_prefill_tokens=choose((None, 4)),
            enable_prefix_caching=choose((True, True, False)),
            stream_interval=choose((1, 1, 3)),
            async_scheduling=choose((True, False)),
        )
        self._max_num_seqs = self.target.max_num_seqs = config.max_num_seqs
        is_scripted = choose((True, False)) and speculation.method == "ngram"
        proposer = ScriptedProposer(self._draft) if is_scripted else None
        policy = SpeculationPolicy(SpeculationControl("on", 32, 3), lambda: self._now_s)
        return Engine(
            config, model, self.target, tokenizer, proposer, policy, clock=lambda: self._now_s
        )

    def _make_speculation(self) -> SpeculativeConfig:
        choose = self.random.choice
        has_head = choose((True, False))
        return SpeculativeConfig.of(
            choose(("medusa", "eagle3")) if has_head else "ngram",
            choose((1, 3, 5)),
            **({"model": "head"} if has_head else {"prompt_lookup_min": 1}),
        )

    def _draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return drafts that are right up to a random place."""
        drafts = self._reference.continuation(tokens, self.random.randint(0, count))
        if drafts and self.random.random() < 0.4:
            drafts[self.random.randrange(len(drafts))] += 1
        return drafts

    def _event(self) -> None:
        self._now_s += self.random.random()
        events = {
            self._step: 10,
            self._add: 4,
            self._cancel: 1,
            self._reconnect: 1,
            self._toggle: 1,
            self._expire: 1,
            self._lose: 1,
        }
        if self._is_lost:
            del events[self._step]
            events[self._recover] = 4
        [event] = self.random.choices(list(events), list(events.values()))
        event()

    def _add(self) -> None:
        if len(self._clients) >= 12:
            return
        choose, name = self.random.choice, f"call {len(self._calls)}"
        prompt = self._prompt()
        params = SamplingParams(
            temperature=0.0,
            n=choose((1, 1, 1, 3)),
            max_tokens=self.random.randint(1, 20),
            stop_token_ids=choose(((), (), (12,))),
            ignore_eos=True,
        )
        budget = choose((None, None, None, 2, 7)) if params.n == 1 else None
        call = Call(name, (self._expected(prompt, params, budget),) * params.n)
        self._calls.append(call)
        request = EngineRequest(
            prompt,
            params,
            request_id=name,
            seed=7,
            priority=choose((0, 0, -2, 2)),
            cache_salt=choose(("", "salt")),
            queue_deadline_s=self._now_s + choose((3.0, 1e9)),
            detokenize=choose((True, False, False)),
            thinking_budget=None if budget is None else ThinkingBudget(budget, MARK, bool),
        )
        self._send(Client(call, request))

    def _prompt(self) -> Tokens:
        length = self.random.randint(1, 24)
        first = self.random.randrange(4)
        return tuple(10 + (first + place // 3) % 4 for place in range(length))

    def _send(self, client: Client) -> None:
        try:
            self.engine.add(client.request)
        except SpecdecError as error:
            client.call.end(type(error).__name__)
        else:
            self._clients[client.request.request_id] = client

    def _expected(self, prompt: Tokens, params: SamplingParams, budget: int | None) -> Tokens:
        assert params.max_tokens is not None
        room = min(params.max_tokens, MAX_MODEL_LEN - len(prompt))
        tokens = self._reference.continuation(prompt, room)
        if budget is not None and budget < room:
            known = [*tokens[:budget], *MARK]
            num_left = room - len(known)
            tokens = known[:budget]
            if num_left > 0:
                tokens = known + self._reference.continuation((*prompt, *known), num_left)
        ends = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
        return tuple(tokens[: ends[0] + 1] if ends else tokens)

    def _some_client(self) -> Client | None:
        return self.random.choice([*self._clients.values()]) if self._clients else None

    def _cancel(self) -> None:
        client = self._some_client()
        if client is not None:
            self._abort(client)
            client.call.end(CANCELLED)

    def _abort(self, client: Client) -> None:
        self.engine.abort(client.request.request_id)
        del self._clients[client.request.request_id]

    def _reconnect(self) -> None:
        """Break a client's stream off, and have it go on with the tokens that it received."""
        client = self._some_client()
        if client is None or client.request.params.n > 1 or client.request.thinking_budget:
            return
        self._abort(client)
        request = replace(
            client.request,
            request_id=f"{client.request.request_id}+",
            resume_token_ids=client.call.tokens(),
        )
        self._send(Client(client.call, request))

    def _toggle(self) -> None:
        mode, count = self.random.choice((("on", 3), ("on", 1), ("off", 3), ("auto", 3)))
        self.engine.set_speculation(SpeculationControl(mode, self.random.randint(0, 4), count))

    def _expire(self) -> None:
        for request_id in self.engine.expire(self._now_s):
            self._clients.pop(request_id).call.end(EXPIRED)

    def _lose(self) -> None:
        """Have the target fail soon, or mark it as lost between two steps."""
        self.target.loses_in = self.random.choice(("begin", "after begin", "collect"))
        if self.random.random() < 0.2:
            self._is_lost = True

    def _recover(self) -> None:
        self._num_admitted_before += self.target.num_admitted_ahead
        self.target, self._is_lost = self._make_target(), False
        self.target.max_num_seqs = self._max_num_seqs
        self.engine.replace_target(self.target)

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        try:
            delivery = self.engine.step().delivery
        except TargetLostError as error:
            delivery = self.committed(error)
            self._is_lost = True
            self.num_losses += 1
        for output in delivery.outputs:
            self._clients[output.request_id].stream.put(output)
        for request_id, token_id in zip(delivery.request_ids, delivery.token_ids, strict=True):
            self._clients[request_id].stream.put_token(token_id)
        self.num_tokens_alone += len(delivery.token_ids)
        self._read_streams(share=0.7)

    def _read_streams(self, share: float) -> None:
        """Have a share of the clients read; those that are late get outputs that are joined."""
        for client in [*self._clients.values()]:
            if self.random.random() < share:
                for output in self._deliver([*client.read()]):
                    self._receive(output)

    def _receive(self, output: EngineOutput) -> None:
        client = self._clients[output.request_id]
        call, num_tokens = client.call, output.num_output_tokens
        is_end = output.finish_reason is not None
        call.receive(output.choice, output.token_ids, ends_choice=is_end)
        if output.error is not None:
            call.end(type(output.error).__name__)
        elif output.is_last:
            call.end(FINISHED, num_tokens)
        elif client.request.params.n == 1 and num_tokens != len(call.tokens()):
            self._wrong_counts.append(f"{call.name}: {num_tokens} tokens counted before its end")
        if call.has_ended:
            del self._clients[output.request_id]
