"""The persistent kernels of CUDA: all steps in one launch, with R in registers and shared memory.

``tilings.py`` says how they may be tiled. Here is which tilings wheels hold, and which is taken for a problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scan_registry.hardware.target import Target
from scan_registry.kernels import model
from scan_registry.kernels.rnn import tilings
from scan_registry.kernels.rnn.launches import (
    FAMILY_NAME,
    KINDS,
    launch_of,
    parameters,
    rejects_kind,
)
from scan_registry.kernels.rnn.problem import SIZES, Direction, RnnProblem
from scan_registry.kernels.rnn.tilings import Tiling


def _kind(pins: model.Pins, direction: Direction) -> tuple[int, int, bool]:
    """Of a kind, gates that R feeds, bytes of an element, and whether it is backward."""
    named = dict(pins)
    gates = SIZES[named["function"]].recurrent  # type: ignore[index]
    return gates, model.ITEM_SIZE[str(named["dtype"])], direction == "backward"


def _tiling(pins: model.Pins, direction: Direction) -> Tiling:
    """Of a variant's static parameters."""
    named = dict(pins)
    return Tiling(*_kind(pins, direction), *(int(named[name]) for name in tilings.DOMAINS))


def _tilings(kind: model.Pins, direction: Direction) -> tuple[model.Pins, ...]:
    """Up to some hundred units, a block has 64 of them and few warps share a row of R, so that few blocks
    have to wait for each other; else 16 of them, with as much of R as there is room for. A block may also
    have a head of up to 64 units for itself and, forwards, a cluster one of up to 256. In float32 a block
    may also compute one sequence of a head of up to 128 units, without tensor cores."""
    function, (gates, item, _) = dict(kind)["function"], _kind(kind, direction)
    narrow = item == 2
    # sLSTM's other states, LSTM's gradients and float32 that is split into parts take registers, too.
    crowded = function == "slstm" or (function == "lstm" and direction == "backward" and narrow)
    chunks = (12 if crowded else 16) // gates
    few = chunks if narrow else 12 // gates
    deep = {"chunks": chunks, "layers": 8 // gates}
    if function == "elman" and narrow:
        deep = {"chunks": 8}  # for 2048 units, which have about as many SMs as there are
    choices = [
        _pins(rows=4, split=2, chunks=few, layers=4 // gates),
        _pins(rows=1, split=8, **deep),
    ]
    if direction == "forward":
        choices.append(_pins(rows=4, split=2, chunks=2 if narrow else 4, cluster=1))
    if not narrow:
        large = 5 if gates == 4 else 8  # of 8 chunks; more in registers would spill
        choices += [
            _pins(rows=4, split=2, batches=0, chunks=4, cluster=1),
            _pins(rows=8, split=2, batches=0, chunks=large, layers=8 - large, cluster=1),
        ]
    elif direction == "forward":
        choices.append(_pins(rows=2, split=2, chunks=8, cluster=8))
    else:
        choices.append(_pins(rows=4, split=2, chunks=1, cluster=1))
    return tuple(choices)


def _pins(**pins: int) -> model.Pins:
    return tuple(
        (name, {"batches": 1, "layers": 0, "cluster": 0, **pins}[name]) for name in tilings.DOMAINS
    )


def _space(kind: model.Pins, direction: Direction) -> Iterator[model.Pins]:
    """What tuning may choose from, on GPUs that have the most shared memory."""
    for tiling in tilings.enumerate_tilings(*_kind(kind, direction), tilings.HOPPER):
        yield tuple((name, getattr(tiling, name)) for name in tilings.DOMAINS)


def constants(variant: model.Variant) -> dict[str, model.Static]:
    tiling = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {"ELEMENT": variant.text("dtype"), "FUNCTION": variant.text("function"), **tiling}


def _accepts(direction: Direction, variant: model.Variant, problem: RnnProblem) -> str | None:
    reason = rejects_kind(variant, problem)
    return reason or _tiling(variant.statics, direction).exceeded(problem.dim)


def _exceeds_residency(
    direction: Direction, variant: model.Variant, problem: RnnProblem, sm_count: int
) -> str | None:
    """Blocks wait for one another, so all have to run."""
    members = _tiling(variant.statics, direction).members(problem.dim)
    return f"blocks of a group at once: {members} > {sm_count}" if members > sm_count else None


def _launch(
    direction: Direction, variant: model.Variant, problem: RnnProblem, sm_count: int
) -> model.Launch:
    tiling = _tiling(variant.statics, direction)
    members, tile = tiling.members(problem.dim), tiling.tile
    groups = problem.heads * -(-problem.batch // tile)
    # Blocks of one sequence wait for nobody, and so need not run at once.
    at_once = max(1, min(groups, sm_count // members) if tiling.batches else groups)
    published = problem.dim * (tiling.gates if direction == "backward" else 1)
    alone = (members == 1 and tiling.rows > 1) or tiling.cluster
    if (
        direction == "forward"
    ):  # Backwards a step publishes for the gradients of initial states, too.
        alone = alone or problem.time == 1
    ring = 0 if alone else tilings.RING * tile * published * tiling.item
    return launch_of("sequence", direction, problem, at_once * members, at_once * ring)


#: SMs of the GPUs that costs are estimated for.
_TYPICAL = 128
#: What a step costs in clusters, in a block that waits for no other, and where a block has so many units
#: that it is the product that takes time, by the bytes of an element; and what every further wait costs.
_CLUSTER, _ALONE, _MANY, _WAIT = {1: 0.3, 8: 0.5}, 0.5, {2: 1.3, 4: 2.3}, 0.35
#: What a step of one sequence costs in a block of up to 64 units, and in a larger one for each gate.
_SINGLE, _SINGLE_GATE = 0.16, 0.2


def _cost(direction: Direction, variant: model.Variant, problem: RnnProblem) -> float:
    """About how long a step of all batches and heads takes, in steps of one group. Of equals, the fewer
    blocks have to wait for each other, the better."""
    tiling = _tiling(variant.statics, direction)
    members, tile = tiling.members(problem.dim), tiling.tile
    groups = problem.heads * -(-problem.batch // tile)
    at_once = max(1, _TYPICAL // members)
    if tiling.single:
        at_once *= tiling.blocks_per_sm
        step = _SINGLE if tiling.rows <= 4 else _SINGLE_GATE * tiling.gates
    elif tiling.cluster:
        step = _CLUSTER[tiling.cluster]
    elif members == 1 and tiling.rows > 1:
        step = _ALONE
    else:
        step = _MANY[tiling.item] if tiling.rows == 4 else 1
        step += _WAIT * (tiling.windows(problem.dim) - 1)
    return -(-groups // at_once) * step + members / 1000


#: Blocks of one sequence that are not compiled for 12.x, neither for wheels nor at run time, as CUDA 12.9's NVRTC ends with a
#: segmentation fault: direction, function and ``rows``.
_CRASHES = {
    ("forward", "gru", 8),
    ("backward", "gru", 8),
    ("backward", "lstm", 4),
}


def _serves(direction: Direction, statics: model.Pins, target: Target) -> bool:
    """Clusters are known to be worth their bytes on 9.0, where forwards they take the place of wide
    blocks. Clusters of several blocks need 9.0. Blocks of one sequence are served where their shared
    memory fits; those of sLSTM and Elman on 9.0 alone, to keep wheels small."""
    pins = dict(statics)
    if pins.get("batches") == 0:
        if pins["function"] in ("slstm", "elman") and target.capability != (9, 0):
            return False
        if (
            not target.is_ptx
            and target.capability[0] == 12
            and (direction, pins["function"], pins["rows"]) in _CRASHES
        ):
            return False
        return _tiling(statics, direction).shared_bytes <= target.shared_memory
    if pins.get("cluster"):
        return target.capability == (9, 0)
    wide = pins.get("rows") == 4
    return not (wide and direction == "forward" and target.capability == (9, 0))


def kernel(direction: Direction) -> model.Kernel:
    """``sequence_forward`` or ``sequence_backward``."""
    return model.Kernel(
        family=FAMILY_NAME,
        name=f"sequence_{direction}",
        language="cuda",
        parameters=parameters("sequence", direction),
        defaults=model.Space(KINDS, lambda kind: _tilings(kind, direction)),
        code=model.Code(
            source=f"sequence_{direction}.cu",
            entry=f"rnn_sequence_{direction}",
            constants=constants,
            warps=lambda variant: _tiling(variant.statics, direction).threads // 32,
            shared=lambda variant: _tiling(variant.statics, direction).layer_bytes,
        ),
        rules=model.Rules(
            accepts=partial(_accepts, direction),
            exceeds_residency=partial(_exceeds_residency, direction),
            serves=partial(_serves, direction),
        ),
        cost=partial(_cost, direction),
        launch=partial(_launch, direction),
        tunable=model.Tunable(model.Space(KINDS, lambda kind: _space(kind, direction))),
    )
