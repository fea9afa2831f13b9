"""Ids of adapters: which one has an id, and until when."""

import pytest

from specdec import LoRARequest
from specdec.llm.lora_ids import LoRAIds
from specdec.types.errors import InvalidValueError

SQL, CHAT = LoRARequest("sql", 1, "/a"), LoRARequest("chat", 1, "/b")


def assert_taken(ids, lora, present):
    with (
        pytest.raises(InvalidValueError, match="sql has this one"),
        ids.used_by_call(lora, lambda: present),
    ):
        pass


def test_an_id_belongs_to_the_adapter_of_an_open_call():
    ids = LoRAIds()
    with ids.used_by_call(SQL, lambda: ()):
        with ids.used_by_call(SQL, lambda: ()):
            assert_taken(ids, CHAT, ())
        assert_taken(ids, CHAT, ())
    with ids.used_by_call(CHAT, lambda: ()):
        pass


def test_an_id_belongs_to_a_loaded_or_ordered_adapter_after_its_calls():
    ids = LoRAIds()
    with ids.used_by_call(SQL, lambda: ()):
        pass
    assert_taken(ids, CHAT, ("sql",))
    with ids.used_by_call(CHAT, lambda: ("another",)):
        pass


def test_an_adapter_is_named_by_the_id_that_it_had_last():
    ids = LoRAIds()
    for lora in (SQL, LoRARequest("sql", 2, "/a")):
        with ids.used_by_call(lora, lambda: ("sql",)):
            pass
    assert ids.name_of("sql", ()) == "sql"
    assert ids.name_of(2, ("sql",)) == "sql"
    for other, present in ((1, ("sql",)), (2, ()), (True, ("sql",)), ([], ("sql",))):
        with pytest.raises(InvalidValueError, match="lora_int_id"):
            ids.name_of(other, present)


def test_ids_of_adapters_that_are_gone_are_forgotten():
    ids, loaded = LoRAIds(), []
    for number in range(1, 9):
        with ids.used_by_call(LoRARequest(f"a{number}", number, "/a"), lambda: loaded):
            assert len(ids._names) <= 2, "the one before, which is present, and its own"
        loaded[:] = [f"a{number}"]
    assert not ids._num_calls


def test_the_adapters_that_are_present_are_read_after_another_call_has_ended():
    """A reading from before it would lack an adapter that was loaded for it."""
    ids = LoRAIds()

    def present():
        assert ids._lock.locked()
        return ("sql",)

    with ids.used_by_call(SQL, present):
        assert ids.name_of(1, ("sql",)) == "sql"
