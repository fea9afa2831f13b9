"""From the engine's outputs to the protos of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cluster.api.grpc.sampling_codec import VERIFIER_NAMES
from protos.specdec.v1 import inference_pb2 as pb
from specdec.engine.outputs import RequestOutput
from specdec.types.messages import Logprobs
from specdec.types.sampling_params import LOSSY_VERIFIERS

Spell = Callable[[Sequence[int]], list[str]]
"""Each token as the vocabulary spells it."""


def encode_stream_chunk(
    seed: int, output: RequestOutput, spell: Spell, *, is_first: bool
) -> pb.GenerateStreamResponse:
    """What one step added to a choice; the seed in the first and the last message of the request.

    `spell` is called for tokens whose logprobs are told, and for no others.
    """
    return pb.GenerateStreamResponse(
        request_id=output.request_id,
        seed=seed if is_first or output.is_last else None,
        choice=output.choice,
        text=output.text,
        token_ids=output.token_ids,
        is_drafted=output.is_drafted,
        logprobs=_encode_logprobs([output.logprobs], spell),
        prompt_logprobs=_encode_logprobs([output.prompt_logprobs], spell),
        usage=_encode_usage(output) if output.is_last else None,
        **_ending(output),
    )


def encode_completion(
    seed: int, outputs: Sequence[RequestOutput], spell: Spell
) -> pb.GenerateResponse:
    """All outputs of one request, in order, as one answer."""
    last = outputs[-1]
    assert last.is_last, "a completion without its end"
    num_choices = 1 + max(output.choice for output in outputs)
    return pb.GenerateResponse(
        request_id=last.request_id,
        seed=seed,
        choices=[
            _encode_choice([output for output in outputs if output.choice == index], spell)
            for index in range(num_choices)
        ],
        prompt_logprobs=_encode_logprobs([output.prompt_logprobs for output in outputs], spell),
        usage=_encode_usage(last),
    )


def _encode_choice(outputs: Sequence[RequestOutput], spell: Spell) -> pb.Choice:
    last = outputs[-1]
    assert last.finish_reason is not None, "a choice without its end"
    return pb.Choice(
        index=last.choice,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=_encode_logprobs([output.logprobs for output in outputs], spell),
        **_ending(last),
    )


def _ending(output: RequestOutput) -> dict[str, Any]:
    """The fields that say why a choice ended, which chunk and choice have alike."""
    finish_reason, stop_reason = output.finish_reason, output.stop_reason
    if finish_reason is None:
        return {}
    ending: dict[str, Any] = {"finish_reason": f"FINISH_REASON_{finish_reason.name}"}
    if stop_reason is not None:
        field = "stop_string" if isinstance(stop_reason, str) else "stop_token_id"
        ending[field] = stop_reason
    return ending


def _encode_logprobs(parts: Sequence[Logprobs | None], spell: Spell) -> pb.Logprobs | None:
    """The given parts behind one another; None where there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    token_ids = np.concatenate([part.token_ids for part in given])  # [num_positions, num_listed]
    listed = token_ids.ravel().tolist()
    return pb.Logprobs(
        num_listed=token_ids.shape[1],
        token_ids=listed,
        logprobs=np.concatenate([part.logprobs for part in given]).ravel().tolist(),
        tokens=spell(listed),
        ranks=np.concatenate([part.ranks for part in given]).tolist(),
    )


def _encode_usage(output: RequestOutput) -> pb.Usage:
    speculation = output.speculation
    return pb.Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        speculation=pb.SpeculationUsage(
            num_drafts=speculation.num_drafts,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_tokens,
            verifier=VERIFIER_NAMES.spelling(output.verifier),
            is_lossless=output.verifier not in LOSSY_VERIFIERS,
        ),
    )
