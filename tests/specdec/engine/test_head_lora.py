# Modules: specdec.worker.head.adapters
"""Adapters of draft heads: they change drafts as merged ones do, alone and in a batch, no token."""

import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch

from specdec.config.engine import AdapterLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.kernels.cpu import native_library
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.adapters import AdapterOrder
from specdec.types.control import SpeculationControl
from specdec.types.drafters import HeadFile
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.worker import HeadFiles
from tests.combinations import every_value
from tests.specdec.adapters import HEAD_MODULES, adapter_dir, merged_dir, rewrite
from tests.specdec.engines import (
    engine_config,
    load_adapter,
    local_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS

K, NUM_NODES = 4, 10
LIMITS = AdapterLimits(max_loras=5, max_rank=16, max_loaded=8)
KERNELS = ["torch"] + ["native"] * (native_library() is not None)
METHODS = list(HEADS)
NAMES = ["", "both", "target", "draft", "other"]
"""Without an adapter; with one of target and head, of the target alone, and two of the head."""
NUM_TOKENS = 12
"""Of an answer, half of the others' length: the drafts of all adapters differ by then."""


def prompt(index):
    return [(29 * index + 31 * place) % 380 + 3 for place in range(9 + 8 * index)]


def requests(engine, names=NAMES, **params):
    asked = (
        request(name or "base", prompt(i), seed=i, temperature=0.0, **params)
        for i, name in enumerate(NAMES)
        if name in names
    )
    return [with_adapter(engine, each, each.request_id.replace("base", "")) for each in asked]


def new_engine(
    directory,
    head,
    targets,
    drafts,
    *,
    kernels="auto",
    group=None,
    num_nodes=0,
    names=NAMES[1:],
):
    """Return an engine with adapters. head: method and directory. targets, drafts: by name."""
    method, path = head
    speculation = SpeculativeConfig.of(method, K, model=str(path), num_draft_tree_tokens=num_nodes)
    control = SpeculationControl("on", 32, K)
    policy = SpeculationPolicy(control, clock=lambda: 0.0, num_tree_tokens=num_nodes)
    config = engine_config(  # room for all trees, or for parts of the prompts
        speculation=speculation, adapters=LIMITS, max_num_batched_tokens=256 if num_nodes else 64
    )
    files = HeadFiles(path, method=method)
    engine = local_engine(directory, config, group, None, policy, head=files, kernels=kernels)
    for name in names:
        load_adapter(engine, name, targets.get(name), draft=drafts.get(name))
    return engine


def drafted(engine, batches):
    """Run batches of requests; return tokens and drafts by request and number of its tokens."""
    head, drafts, counts = engine._steps.target._runner.head, defaultdict(dict), defaultdict(int)
    draft_all = head.draft

    def recorded(*args):
        ids = {seq.seq_id: seq.request.request_id for seq in engine._scheduler._running}
        verified = draft_all(*args)
        for row in verified:
            name = ids[row.seq_id]
            counts[name] += len(row.token_ids)
            found = row.next_draft_token_ids, row.next_draft_parents
            drafts[name][counts[name]] = found
        return verified

    head.draft = recorded
    tokens = {}
    for batch in batches:
        tokens |= tokens_by(engine, batch)
    head.draft = draft_all
    return tokens, dict(drafts)


@pytest.fixture(scope="module")
def targets(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {
        name: adapter_dir(root / name, tiny_model_dir, seed=seed)
        for seed, name in enumerate(("both", "target"))
    }


@pytest.fixture(scope="module")
def expected(tiny_model_dir, targets):
    """Return the tokens of each request without speculation."""
    engine = local_engine(tiny_model_dir, engine_config(adapters=LIMITS))
    load_adapter(engine, "both", targets["both"])
    load_adapter(engine, "target", targets["target"])
    own = tokens_by(engine, requests(engine, ["", "both", "target"]))
    plain = [request(name, prompt(NAMES.index(name))) for name in ("draft", "other")]
    return own | tokens_by(engine, plain)


@pytest.fixture(scope="module")
def files_of(tiny_model_dir, tmp_path_factory, expected):
    """Return a function of a method: a fitted head, and adapters of it by name."""
    found = {}

    def write(method):
        if method not in found:
            root = tmp_path_factory.mktemp(method)
            names = [name or "base" for name in NAMES]
            texts = [[*prompt(i), *expected[name]] for i, name in enumerate(names)]
            head = HEADS[method](tiny_model_dir, root / "head", texts)
            layers = [2] if method == "mtp" else None
            adapters = {
                name: adapter_dir(
                    root / name,
                    head,
                    seed=9 + i,
                    modules=HEAD_MODULES,
                    layers=layers,
                    rank=4 + 4 * i,
                )
                for i, name in enumerate(("both", "draft", "other"))
            }
            found[method] = (method, head), adapters
        return found[method]

    return write


QUICK = {
    ("medusa", "native", 1, 0),
    ("eagle3", "native", 2, NUM_NODES),
    ("dflash", "torch", 1, NUM_NODES),
    ("mtp", "torch", 2, 0),
}
"""Each pair of kernels, ranks and nodes of a tree; the test of merged heads has every method."""


@pytest.mark.parametrize(
    ("method", "kernels", "size", "num_nodes"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in product(METHODS, KERNELS, (1, 2), (0, NUM_NODES))
    ],
)
def test_drafts_are_those_of_the_own_adapter_alone_and_in_a_batch(
    tiny_model_dir, targets, expected, files_of, method, kernels, size, num_nodes
):
    head, adapters = files_of(method)

    def check(group):
        def run(drafts, batches):
            engine = new_engine(
                tiny_model_dir,
                head,
                targets,
                drafts,
                kernels=kernels,
                group=group,
                num_nodes=num_nodes,
            )
            asked = [requests(engine, names, max_tokens=NUM_TOKENS) for names in batches]
            tokens, drafts = drafted(engine, asked)
            assert tokens == {name: each[:NUM_TOKENS] for name, each in expected.items()}
            return drafts

        together = run(adapters, [NAMES])
        assert together == run(adapters, [[name] for name in NAMES])
        unadapted = run({"draft": adapters["draft"]}, [NAMES])
        changed = {name for name in together if together[name] != unadapted[name]}
        assert changed == {"both", "other"}

    run_ranks(size, check)


@pytest.mark.parametrize(("method", "kernels"), every_value(METHODS, KERNELS))
def test_an_adapter_drafts_as_the_head_that_it_is_merged_into(
    tiny_model_dir, tmp_path, expected, files_of, method, kernels
):
    head, adapters = files_of(method)
    merged = method, merged_dir(tmp_path / "merged", head[1], adapters["draft"])
    if method == "mtp":
        tiny_model_dir = head[1]

    def run(head, drafts):
        engine = new_engine(tiny_model_dir, head, {}, drafts, kernels=kernels)
        return drafted(engine, [requests(engine, ["draft"], max_tokens=NUM_TOKENS)])

    tokens, own = run(head, {"draft": adapters["draft"], "other": adapters["other"]})
    assert tokens == {"draft": expected["draft"][:NUM_TOKENS]}
    assert own == run(merged, {})[1]
    assert own != run(head, {})[1]


@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash"])
def test_no_kv_of_a_head_is_shared_between_its_adapters(tiny_model_dir, files_of, method):
    """Requests with the same prompt, one after the other, and again with hits of their prefixes."""
    head, adapters = files_of(method)
    names = ["", "draft", "other"]

    def run(engine, names):
        same = [replace(each, prompt=prompt(4)) for each in requests(engine, names)]
        found = drafted(engine, [[each] for each in same])[1]
        return found, engine.stats().counts.num_cached_tokens

    engine = new_engine(tiny_model_dir, head, {}, adapters)
    first, num_cached = run(engine, names)
    assert num_cached == 0
    again, num_cached = run(engine, names)
    assert num_cached > 60
    alone = {}
    for name in names:
        alone |= run(new_engine(tiny_model_dir, head, {}, adapters), [name])[0]
    assert first == again == alone
    assert len({repr(each) for each in first.values()}) == 3


def test_adapters_come_and_go_under_traffic(tiny_model_dir, targets, expected, files_of):
    head, adapters = files_of("eagle3")
    engine = new_engine(tiny_model_dir, head, targets, adapters)
    asked, tokens = requests(engine), defaultdict(list)
    for each in asked:
        engine.add(each)
    orders = [(name, path) for path in (None, adapters["both"]) for name in NAMES[1:]]
    num_orders = len(orders)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
        if engine.adapters.has_room and orders:
            name, path = orders.pop()
            load_adapter(engine, name, targets.get(name), replaces=True, draft=path)
    assert num_orders - len(orders) >= 4
    assert tokens == expected


def test_an_adapter_is_for_the_version_of_the_head_that_it_names(
    tiny_model_dir, tmp_path, files_of
):
    (method, first), adapters = files_of("medusa")
    second = merged_dir(tmp_path / "second", first, adapters["other"])
    own = shutil.copytree(adapters["draft"], tmp_path / "own")
    rewrite(own, head_sha256=weights_fingerprint(first))

    def run(adapter, start, version=None):
        engine = new_engine(tiny_model_dir, (method, start), {}, {"draft": adapter})
        if version is not None:
            engine._steps.target.begin_head_load(HeadFile(2, "second", str(version)))
            assert engine._steps.target.collect_head_load() == ""
            engine._steps.target.switch_head(2)
        return drafted(engine, [requests(engine, ["draft"])])[1]

    both = run(adapters["draft"], second)
    assert run(adapters["draft"], first, second) == both
    unadapted = run(None, second)
    assert run(own, first, second) == unadapted != both
    assert run(own, first) == run(adapters["draft"], first)


def test_orders_name_the_part_that_does_not_fit(tiny_model_dir, tmp_path, targets, files_of):
    head, adapters = files_of("eagle3")
    engine = new_engine(tiny_model_dir, head, {}, {})
    control = AdapterControl(engine, engine.adapters, LIMITS, "tiny")
    path, draft = str(targets["target"]), str(adapters["draft"])
    bad = shutil.copytree(adapters["draft"], tmp_path / "bad")
    rewrite(bad, lambda tensors: {name: each * torch.nan for name, each in tensors.items()})
    for paths, text in (
        ({"draft_path": path}, r"layers\.0\.\S+ is not a linear layer of the draft head's layers"),
        ({"path": draft}, "is a module of a draft head, whose adapter is given as draft_path"),
        ({"draft_path": str(bad)}, "has NaN or Inf"),
        ({"path": path, "draft_path": str(bad)}, "has NaN or Inf"),
    ):
        with pytest.raises(UnsupportedModelError, match=text):
            control.load_all([AdapterOrder.load("new", **paths)])
    control.load_all([AdapterOrder.load("new", draft_path=draft)] * 2)
    info = engine.adapter_infos()[-1]
    assert (info.name, info.source, info.draft_source) == ("new", "", draft)
    with pytest.raises(InvalidValueError, match="a name that no loaded adapter has"):
        control.load_all([AdapterOrder.load("new", path)])


def restarted(engine, directory, head, asked):
    """Run requests over a restart of the target with a head; return their tokens."""
    tokens = defaultdict(list)
    for each in asked:
        engine.add(each)
    for index in range(1000):
        for output in engine.step() if engine.has_work else ():
            assert output.error is None, output.error
            tokens[output.request_id].extend(output.token_ids)
        if index == 4:
            other = new_engine(directory, head, {}, {}, names=())
            engine.replace_target(other._steps.target)
    assert not engine.has_work
    engine.check_integrity()
    return tokens


def is_drafting(engine, name):
    """Return whether a head's counterpart of an adapter updates the version that drafts."""
    runner = engine._steps.target._runner
    version = runner.adapters._head._versions[runner.head.head]
    adapter = runner.adapters._head._adapters[engine.adapters.ids[name]]
    return adapter is not None and version.is_base_of(adapter.head_sha256)


def test_a_lost_counterpart_costs_no_request_after_a_restart(
    tiny_model_dir, tmp_path, targets, expected, files_of
):
    head, adapters = files_of("eagle3")
    drafts = {n: shutil.copytree(adapters[n], tmp_path / n) for n in ("both", "draft")}
    engine = new_engine(tiny_model_dir, head, targets, drafts | {"other": adapters["other"]})
    shutil.rmtree(drafts["both"])
    shutil.rmtree(drafts["draft"])
    assert restarted(engine, tiny_model_dir, head, requests(engine)) == expected
    assert [is_drafting(engine, name) for name in NAMES[1:]] == [False, False, False, True]
    assert set(engine.adapters.ids) == {*NAMES[1:]}
    assert tokens_by(engine, requests(engine)) == expected


def test_a_counterpart_for_a_version_that_is_loaded_later_stays_after_a_restart(
    tiny_model_dir, tmp_path, targets, expected, files_of
):
    (method, first), adapters = files_of("eagle3")
    second = method, merged_dir(tmp_path / "second", first, adapters["other"])
    own = shutil.copytree(adapters["both"], tmp_path / "own")
    rewrite(own, head_sha256=weights_fingerprint(first))
    engine = new_engine(tiny_model_dir, (method, first), targets, {"both": own})
    assert restarted(engine, tiny_model_dir, second, requests(engine)) == expected
    assert not is_drafting(engine, "both")
    shutil.rmtree(own)
    target = engine._steps.target
    target.begin_head_load(HeadFile(2, "first", str(first)))
    assert target.collect_head_load() == ""
    target.switch_head(2)
    assert is_drafting(engine, "both")
    assert tokens_by(engine, requests(engine)) == expected
