"""LoRA adapters through `LLM` and `AsyncLLM`."""

import asyncio

import pytest

from specdec import LLM, AsyncLLM, LoRARequest, SamplingParams
from specdec.types.errors import (
    InvalidValueError,
    ModelNotFoundError,
    UnknownModelError,
    UnsupportedModelError,
)
from tests.specdec.adapters import adapter_dir, merged_dir
from tests.specdec.llm.models import arguments, metrics_of

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = "The river begins"
NAMES = ("sql", "chat", "code", "base")


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    paths = {
        name: adapter_dir(root / name, tiny_model_dir, seed=seed)
        for seed, name in enumerate(NAMES[:3])
    }
    return {
        name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), 1)
    }


@pytest.fixture(scope="module")
def expected(tiny_model_dir, adapters, tmp_path_factory):
    """Return the tokens of the model, and of it with each adapter merged."""
    root, found = tmp_path_factory.mktemp("merged"), {}
    for name in NAMES:
        directory = tiny_model_dir
        if name in adapters:
            path = adapters[name].lora_path
            directory = merged_dir(root / name, tiny_model_dir, type(root)(path))
        with LLM(**arguments(directory, speculative_config=None)) as llm:
            [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
            found[name] = output.outputs[0].token_ids
    return found


def lora_arguments(directory, **changes):
    return arguments(directory, enable_lora=True, max_loras=2, **changes)


def tokens(outputs):
    return [each.outputs[0].token_ids for each in outputs]


def test_a_batch_with_more_adapters_than_fit(tiny_model_dir, adapters, expected):
    """Idle adapters make room for others, whatever the order."""
    names = ["sql", "base", "chat", "code", "sql", "base", "code", "chat"]
    loras = [adapters.get(name) for name in names]
    for max_cpu_loras in (2, 3):
        with LLM(**lora_arguments(tiny_model_dir, max_cpu_loras=max_cpu_loras)) as llm:
            outputs = llm.generate([PROMPT] * 8, PARAMS, use_tqdm=False, lora_request=loras)
            assert tokens(outputs) == [expected[name] for name in names]
            assert len(llm.list_loras()) <= max_cpu_loras
            assert metrics_of(llm)["spec_decode_num_accepted_tokens"] > 0


def test_adapters_are_added_listed_and_removed(tiny_model_dir, adapters, expected):
    with LLM(**lora_arguments(tiny_model_dir)) as llm:
        llm.add_lora(adapters["sql"])
        [info] = llm.list_loras()
        assert (info.name, info.source, info.rank) == ("sql", adapters["sql"].lora_path, 4)
        by_name = LoRARequest("sql", 1)
        assert tokens(llm.generate(PROMPT, PARAMS, False, lora_request=by_name)) == [
            expected["sql"]
        ]
        chat = [{"role": "user", "content": "Hi"}]
        adapted = llm.chat(chat, PARAMS, use_tqdm=False, lora_request=adapters["sql"])
        assert tokens(adapted) != tokens(llm.chat(chat, PARAMS, use_tqdm=False))
        with pytest.raises(InvalidValueError, match=r"lora_int_id is 1; .* sql has this one"):
            llm.add_lora(LoRARequest("other", 1, adapters["sql"].lora_path))
        with pytest.raises(InvalidValueError, match="lora_int_id is 7; it must be the id of a"):
            llm.remove_lora(7)
        assert llm.remove_lora("sql") == ()
        llm.add_lora(adapters["sql"])
        assert llm.remove_lora(adapters["sql"].lora_int_id) == ()
        with pytest.raises(UnknownModelError):
            llm.generate(PROMPT, PARAMS, False, lora_request=by_name)
        unusable = LoRARequest("typo", 1, "/no/such/adapter")
        with pytest.raises(ModelNotFoundError):
            llm.generate(PROMPT, PARAMS, False, lora_request=unusable)
        same_id = LoRARequest("chat", 1, adapters["chat"].lora_path)
        assert tokens(llm.generate(PROMPT, PARAMS, False, lora_request=same_id)) == [
            expected["chat"]
        ]


def test_an_adapter_of_the_draft_model(tiny_model_dir, adapters, expected):
    """The target's adapter on a copy of it: every draft is accepted."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}
    with LLM(**lora_arguments(tiny_model_dir, speculative_config=drafting)) as llm:
        path = adapters["sql"].lora_path
        both = LoRARequest("sql", 1, path, draft_lora_path=path)
        assert tokens(llm.generate(PROMPT, PARAMS, False, lora_request=both)) == [expected["sql"]]
        [info] = llm.list_loras()
        assert info.draft_source == path
        assert info.speculation.acceptance_rate == 1
        with pytest.raises(InvalidValueError, match="which sql was loaded from"):
            llm.generate(PROMPT, PARAMS, False, lora_request=adapters["sql"])
        alone = LoRARequest("alone", 2, draft_lora_path=path)
        assert tokens(llm.generate(PROMPT, PARAMS, False, lora_request=alone)) == [expected["base"]]
        [_, info] = llm.list_loras()
        assert (info.source, info.draft_source) == ("", path)
        assert info.speculation.acceptance_rate < 1


def test_requests_that_are_refused(tiny_model_dir, adapters, tmp_path):
    def generate(llm, lora):
        return llm.generate(PROMPT, PARAMS, False, lora_request=lora)

    with LLM(**lora_arguments(tiny_model_dir)) as llm:
        generate(llm, adapters["sql"])
        for lora, error, message in (
            (LoRARequest("other", 1, "/a"), InvalidValueError, "lora_int_id of prompts"),
            (7, InvalidValueError, "lora_request of prompts"),
            (LoRARequest("x", 9, str(tmp_path)), UnsupportedModelError, "cannot be read"),
            (
                LoRARequest("sql", 1, adapters["chat"].lora_path),
                InvalidValueError,
                "which sql was loaded from",
            ),
        ):
            with pytest.raises(error, match=message):
                generate(llm, lora)
    with (
        LLM(**arguments(tiny_model_dir)) as llm,
        pytest.raises(InvalidValueError, match="enable_lora"),
    ):
        generate(llm, adapters["sql"])
    with pytest.raises(InvalidValueError, match=r"max_cpu_loras is 1; .* at least max_loras \(2\)"):
        LLM(**lora_arguments(tiny_model_dir, max_cpu_loras=1))


def test_adapters_of_a_batch_have_their_own_ids(tiny_model_dir, adapters, expected):
    """None is loaded when the batch is read; a refused batch keeps no id."""
    same_id = LoRARequest("chat", 1, adapters["chat"].lora_path)
    with LLM(**lora_arguments(tiny_model_dir)) as llm:
        with pytest.raises(InvalidValueError, match=r"lora_int_id of prompts\[1\] .* sql has this"):
            llm.generate([PROMPT] * 2, PARAMS, False, lora_request=[adapters["sql"], same_id])
        assert llm.list_loras() == ()
        outputs = llm.generate([PROMPT] * 2, PARAMS, False, lora_request=[same_id, same_id])
        assert tokens(outputs) == [expected["chat"]] * 2


async def test_streams_with_adapters(tiny_model_dir, adapters, expected):
    async with AsyncLLM(**lora_arguments(tiny_model_dir, max_cpu_loras=2)) as llm:

        async def last(name):
            final = None
            async for each in llm.generate(PROMPT, PARAMS, lora_request=adapters.get(name)):
                final = each
            return final.outputs[0].token_ids

        names = [*NAMES, *NAMES]
        found = await asyncio.gather(*map(last, names))
        assert found == [expected[name] for name in names]
        assert {each.num_requests for each in await llm.list_loras()} <= {0}
        async for _ in llm.generate(PROMPT, PARAMS, lora_request=adapters["sql"]):
            break
        for name in [each.name for each in await llm.list_loras()]:
            await llm.remove_lora(name)
        await llm.add_lora(adapters["code"])
        assert [each.name for each in await llm.list_loras()][-1] == "code"
        await llm.remove_lora(adapters["code"].lora_int_id)
        assert "code" not in [each.name for each in await llm.list_loras()]


async def test_a_request_that_waits_for_its_adapter_is_aborted(tiny_model_dir, adapters):
    """The only place for an adapter is taken by one with a request."""
    changes = {"max_loras": 1, "max_cpu_loras": 1, "speculative_config": None}
    async with AsyncLLM(**{**lora_arguments(tiny_model_dir), **changes}) as llm:
        running = llm.generate(PROMPT, PARAMS, "first", lora_request=adapters["sql"])
        await anext(running)

        async def outputs():
            stream = llm.generate(PROMPT, PARAMS, "second", lora_request=adapters["chat"])
            return [each async for each in stream]

        control = llm._llm_engine.engine.loaded.adapters
        waiting = asyncio.create_task(outputs())
        while not control._lock.locked():
            await asyncio.sleep(0.001)
        await llm.abort("second")
        [output] = await asyncio.wait_for(waiting, 10)
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
        await running.aclose()


def test_streams_on_one_event_loop_after_the_other(tiny_model_dir, adapters, expected):
    async def tokens_of(llm, name):
        stream = llm.generate(PROMPT, PARAMS, lora_request=adapters[name], output_kind="final_only")
        return [each.outputs[0].token_ids async for each in stream]

    async def all_of(llm):
        return await asyncio.gather(*(tokens_of(llm, name) for name in NAMES[:3]))

    llm = AsyncLLM(**lora_arguments(tiny_model_dir, max_cpu_loras=2))
    for _ in range(2):
        assert asyncio.run(all_of(llm)) == [[expected[name]] for name in NAMES[:3]]
    llm.shutdown()
