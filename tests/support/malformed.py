"""Files that are nearly right: JSON with a few places changed, and bytes with a few bits. What comes out follows from
the random numbers alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

#: Values as JSON text, some of which is none.
TEXTS = [
    *("null", "true", "false", "0", "-0", "1", "-1", "1.5", "1e3", "2.0", "[]", "{}", '""', '"x"'),
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", str(2**31), str(2**63), str(-(2**63))),
    *(str(2**64), str(2**70), "9" * 400, "9" * 5000, '"\\u0000"'),
    *('"\\ud800"', '"\ud800"', '"\\udfff\\ud800"'),
    *('"sm_90"', '"sm_90a"', '"sm_80"', '"compute_80"', '"٩٠"', "[1,1,1]", "[1,1]", "[12,9]"),
    *("[0,0,0]", "[-1,1,1]", "[1e9,1,1]", "[4294967296,1,1]", '[["x"]]', '{"a":{"a":[]}}'),
    *('"' + "x" * 70_000 + '"', "[" * 100 + "]" * 100, '{"a":' * 50 + "1" + "}" * 50),
    *("[" * depth + "]" * depth for depth in (300, 450, 600, 800, 900, 950, 980, 3000, 100_000)),
    *("", "nul", "{", "]", "'x'", "01", "0x10", '"\\x"', '"\n"', "1,", ",", '"unfinished'),
]
#: What statics of variants may be made to say.
NUMBERS = ["0", "-1", "1", "3", "64", "7777", "x", "", "²", "9" * 30, "9" * 5000, "1.5", "\udc80"]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: the object or list, and the key or number in it."""
    found = []
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in inside:
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            found += nodes(inner)
    return found


def change_text(text: str, chance: random.Random) -> str:
    """A string that is nearly the given one."""
    at = chance.randrange(len(text) + 1)
    kind = chance.randrange(5)
    if kind == 0 and "=" in text:
        items = text.split(",")
        which = chance.randrange(len(items))
        items[which] = f"{items[which].partition('=')[0]}={chance.choice(NUMBERS)}"
        return ",".join(items)
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return (
            text[:at]
            + chance.choice(["\0", "\ud800", "\n", ":", ",", "=", ".", "é", "0"])
            + text[at:]
        )
    if kind == 3:
        return text.upper() if chance.random() < 0.5 else text * 2
    return text[:at] + chr(ord(chance.choice(text or "x")) ^ 1) + text[at + 1 :]


def change(places: list[tuple[Any, Any]], chance: random.Random, texts: list[str]) -> None:
    """Change a value at one of the places, or leave a mark there for one of the ``texts``."""
    place, key = chance.choice(places)
    old, kind = place[key], chance.randrange(10)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(old, int):
        place[key] = chance.choice([old + 1, old - 1, -old, old << 40, float(old), str(old)])
    elif kind == 2:
        # Another binary's offset, size, digest, …
        others = [p[k] for p, k in places if k == key]
        place[key] = json.loads(json.dumps(chance.choice(others)))
    elif kind == 3 and isinstance(old, list):
        place[key] = old * 2 if chance.random() < 0.5 else old[1:]
    elif kind <= 6 and isinstance(old, str):
        place[key] = change_text(old, chance)
    else:
        place[key] = f"@@{len(texts)}@@"
        texts.append(chance.choice(TEXTS))


def malformed(value: Any, chance: random.Random) -> bytes:
    """JSON that differs from the given value in one to three places, in structure or as text."""
    value = json.loads(json.dumps(value))
    texts: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if places := nodes(value):
            change(places, chance, texts)
    text = json.dumps(value)
    for number, given in enumerate(texts):
        text = text.replace(f'"@@{number}@@"', given)
    if chance.random() < 0.15:  # a key twice
        key = chance.choice([k for _, k in nodes(value) if isinstance(k, str)] or ["schema"])
        opened = chance.choice([at for at, c in enumerate(text) if c == "{"] or [0])
        twice = f"{json.dumps(key)}:{chance.choice(TEXTS)},"
        text = text[: opened + 1] + twice + text[opened + 1 :]
    content = text.encode("utf-8", "surrogatepass")
    return damaged(content, chance) if chance.random() < 0.1 else content


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The bytes with flipped bits, cut, mixed up, after a mark of some encoding, or all random."""
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))

    def flipped() -> bytes:
        changed = bytearray(content)
        for _ in range(chance.choice([1, 1, 2, 8]) if content else 0):
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        return bytes(changed)

    ways: list[Callable[[], bytes]] = [
        *(flipped, flipped, flipped),
        lambda: content[:at],
        lambda: content[:at] + content[end:],
        lambda: content[:end] + content[at:],
        lambda: content[:at] + chance.randbytes(end - at) + content[end:],
        lambda: chance.randbytes(chance.choice([0, 1, 47, 48, 49, 1000])),
        lambda: chance.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\xff"]) + content,
    ]
    return chance.choice(ways)()
