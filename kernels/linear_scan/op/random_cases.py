"""Scans that nobody has chosen: shapes drawn at random, as ``bench --random`` times them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import TypeVar

from scan_registry.kernels.linear_scan.op.bench import LAYOUTS, Case
from scan_registry.kernels.model import ITEM_SIZE

#: Bytes that a forward pass moves.
LEAST_TRAFFIC, MOST_TRAFFIC = 10**6, 4 * 10**9
MOST_ROWS = 100_000  # batch times channels
MOST_TIME = 1 << 20
MOST_SEQUENCES, LEAST_MEAN = 1024, 16  # packed along time, and the least of their mean length
#: How often each is drawn. Of the options, one gate for every element and no packed sequences is what most have.
DTYPES = {"bfloat16": 0.5, "float32": 0.3, "float16": 0.2}
OPTIONS = {"": 0.8, "sequences": 0.1, "channel": 0.1}
REVERSE, STATE = 0.1, 0.15
_OTHER = 1 << 40  # how far a seed of other numbers is
_VECTOR = 8  # half of the channel counts are multiples of it
MANY_SCANS = 300  # batch times channels, which occupy a large GPU
ALIGNMENT = 16  # bytes

_Choice = TypeVar("_Choice")


def draw(number: int, seed: int) -> list[Case]:
    """So many different cases, the same for the same seed; of fewer of a seed, the first."""
    source, flags = Random(seed), Random(seed + _OTHER)
    cases: dict[Case, None] = {}
    while len(cases) < number:
        case = _one(source)
        if LEAST_TRAFFIC <= case.traffic("forward") <= MOST_TRAFFIC:
            reverse, state = flags.random() < REVERSE, flags.random() < STATE
            cases[replace(case, reverse=reverse, state=state)] = None
    return list(cases)


def kind(case: Case) -> str:
    """What decides how close to the roofline a case comes, in words."""
    if case.sequences:
        return "packed sequences"
    if case.gates == "channel":
        return "one gate per channel"
    contiguous = "time" if case.layout == "time_last" else "channels"
    many = case.batch * case.channels >= MANY_SCANS
    scans = f"{MANY_SCANS} scans or more" if many else "fewer scans"
    row = case.shape[-1] * ITEM_SIZE[case.dtype]
    return f"contiguous {contiguous}, {scans}, {'misaligned' if row % ALIGNMENT else 'aligned'}"


def _one(source: Random) -> Case:
    """Of any size. Packed sequences are of one batch, as there is no need of more."""
    dtype, options = _pick(source, DTYPES), _pick(source, OPTIONS)
    layout = _pick(source, dict.fromkeys(LAYOUTS, 1 / len(LAYOUTS)))
    rows, time = _log_uniform(source, MOST_ROWS), _log_uniform(source, MOST_TIME)
    channels = _log_uniform(source, rows)
    if source.random() < 0.5:
        channels = channels // _VECTOR * _VECTOR or channels
    odd = source.random() < 0.5
    time += (-1 if odd else 1) * (time % 2 != odd)
    gates = "channel" if options == "channel" else "full"
    if options != "sequences":
        return Case(layout, rows // channels, channels, time, dtype, gates=gates)
    sequences = _log_uniform(source, max(1, min(MOST_SEQUENCES, time // LEAST_MEAN)))
    return Case(layout, 1, channels, time, dtype, sequences=sequences)


def _log_uniform(source: Random, most: int) -> int:
    """From 1 to ``most``."""
    return min(most, int((most + 1) ** source.random()))


def _pick(source: Random, chances: Mapping[_Choice, float]) -> _Choice:
    """By ``random()`` alone, of which Python promises the same numbers in all its versions."""
    left = source.random()
    for choice, chance in chances.items():
        left -= chance
        if left < 0:
            return choice
    return choice
