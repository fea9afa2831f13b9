# Modules: cluster.api.sglang.generate
"""The steps and accepted drafts that an answer of `/generate` reports."""

import pytest

from specdec.engine.committer import Committer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("n", [1, 3])
async def test_every_step_after_the_prompt_counts_as_a_verification(http, monkeypatch, n):
    """Clients divide the tokens of an answer by them."""
    num_commits, commit = dict[int, int](), Committer._append

    def counted(self, seq, token_ids):
        num_commits[seq.choice] = num_commits.get(seq.choice, 0) + 1
        return commit(self, seq, token_ids)

    monkeypatch.setattr(Committer, "_append", counted)
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True, "n": n}
    body = {"text": "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,", "sampling_params": params}
    found = (await http.post("/generate", json=body)).json()
    for each in found if n > 1 else [found]:
        meta = each["meta_info"]
        assert meta["completion_tokens"] == 64
        assert meta["spec_accept_rate"] > 0
        assert 32 < meta["spec_verify_ct"] < 63 if n > 1 else meta["spec_verify_ct"] < 63
        assert meta["spec_accept_length"] == pytest.approx(64 / meta["spec_verify_ct"])
    drafted = sum(num_commits.values())
    assert sum(m["meta_info"]["spec_verify_ct"] for m in (found if n > 1 else [found])) >= drafted
