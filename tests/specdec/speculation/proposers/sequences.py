"""Sequences for proposers that read only their tokens."""

from specdec.sequences.sequence import EngineRequest, Sequence, SequenceStatus
from specdec.speculation.proposers import DraftRequest
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules


def sequence(seq_id, prompt, output=(), *, cache_salt="", method=None):
    params = SamplingParams(speculation=SpeculationOptions(method=method))
    request = EngineRequest(
        tuple(prompt), params, request_id=str(seq_id), seed=0, cache_salt=cache_salt
    )
    seq = Sequence(seq_id, request, SamplingRules(), detokenizer=None)
    seq.token_ids += output
    return seq


def drafts(proposer, *seqs, count=7):
    """Return the draft tokens of each sequence, in order."""
    requests = [DraftRequest(seq, count, method=seq.params.speculation.method) for seq in seqs]
    made = {proposal.seq_id: proposal for proposal in proposer.take(requests)}
    for seq in seqs:
        proposal = made.get(seq.seq_id)
        base = (seq.num_tokens, seq.token_ids[-1])
        assert proposal is None or (proposal.base_length, proposal.base_token) == base
    return [made[seq.seq_id].draft_token_ids if seq.seq_id in made else () for seq in seqs]


def end(proposer, seq):
    seq.status = SequenceStatus.FINISHED
    proposer.release(seq.seq_id)
