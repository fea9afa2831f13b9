"""Random changes of valid inputs: JSON values, bytes and texts."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from tests.e2e.random_messages import FARTHEST_INTEGERS, TEXTS, WILD_FLOATS, WILD_INTEGERS

_MAX_BYTES_CHANGED = 8
_DEEP = 70
_MAX_DEPTH = 3


def wild(random: Random, depth: int = 0) -> Any:
    """Return a value of any JSON type that is rarely the right one."""
    kind = random.randrange(8 if depth < _MAX_DEPTH else 3)
    if kind == 0:
        return random.choice(TEXTS)
    if kind == 1:
        return random.choice((*WILD_INTEGERS, *FARTHEST_INTEGERS, 2**70))
    if kind == 2:
        return random.choice((*WILD_FLOATS, 1e308 * 10, float("nan")))
    if kind == 3:
        return [wild(random, depth + 1) for _ in range(random.choice((0, 1, 2, 40)))]
    if kind == 4:
        return {
            random.choice(TEXTS)[:20]: wild(random, depth + 1) for _ in range(random.randrange(3))
        }
    if kind == 5:
        return _nested(random.choice((2, _DEEP)))
    return random.choice((None, True, False))


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def mutated(value: Any, random: Random, num_changes: int | None = None) -> Any:
    """Return a copy of a JSON value with some parts replaced, dropped, doubled or added."""
    whole = {"": copy.deepcopy(value)}
    for _ in range(random.choice((1, 1, 2, 4)) if num_changes is None else num_changes):
        holder, key = random.choice(_places(whole))
        action = random.randrange(4)
        if action == 0 and key != "":
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.extend([holder[key]] * random.choice((1, 3, 300)))
        elif action == 2 and isinstance(holder, dict) and key != "":
            holder[random.choice(TEXTS)[:20]] = wild(random)
        else:
            holder[key] = wild(random)
    return whole[""]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container below with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for _, key in tuple(found):
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def mutated_bytes(content: bytes, random: Random, end: int | None = None) -> bytes:
    """Return bytes of which a few, before `end`, are changed, removed or repeated."""
    changed = bytearray(content)
    for _ in range(random.randint(1, _MAX_BYTES_CHANGED)):
        at = random.randrange(max(1, min(len(changed), end or len(changed))))
        action = random.randrange(4)
        if action == 0:
            del changed[at : at + random.choice((1, 9, 400))]
        elif action == 1:
            changed[at:at] = random.randbytes(random.choice((1, 9, 400)))
        elif at < len(changed):
            changed[at] = random.randrange(256)
    return bytes(changed)


def mutated_text(text: str, random: Random) -> str:
    """Return a text of which some parts are replaced by wild ones."""
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(TEXTS)[:200] + text[at + random.choice((0, 1, 10)) :]
    return text


def changed_json(content: bytes, random: Random) -> bytes:
    """Return a JSON document with changes, of values or of bytes."""
    if random.random() < 0.5:
        return mutated_bytes(content, random)
    return json.dumps(mutated(json.loads(content), random)).encode()


def changed_checkpoint(content: bytes, random: Random) -> bytes:
    """Return a safetensors file with changes in its header, of values or of bytes."""
    end = 8 + int.from_bytes(content[:8], "little")
    if random.random() < 0.5:
        return mutated_bytes(content, random, end)
    header = json.dumps(mutated(json.loads(content[8:end]), random)).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]
