"""How a compiled program calls a kernel: XLA's foreign function interface.

A call site has two attributes: a text that describes one kernel's call in full, and a digest of it. ``csrc/xla.h`` has the
handler, which looks the digest up. The first time, on each device, it asks ``_resolve`` what to call. The text does not depend
on this process: JAX keeps compiled programs on disk, and others run them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp

from scan_registry.base.frozen import dataclass
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.policy import FallbackWarning
from scan_registry.dispatch.select import Backend, Decision, advice
from scan_registry.hardware import _launcher
from scan_registry.hardware.device import Device, device
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Family, Launch, Problem, Variant
from scan_registry.ops import _cpu
from scan_registry.runtime import loader

#: Of the handler, in XLA: a copy of the package under another name, as from the Hugging Face hub, has a handler of its own.
TARGET = __name__.removesuffix(".jax.ffi")
#: The first version of JAX whose typed FFI the handler answers.
OLDEST = (0, 10)
if jax.__version_info__[:2] < OLDEST:
    raise ImportError(
        f"scan_registry.jax needs JAX {'.'.join(map(str, OLDEST))} or later; this is {jax.__version__}"
    )

#: Platforms that have kernels, as JAX calls them.
PLATFORMS = ("cpu", "cuda")
#: Of the addresses that a kernel for a GPU may rely on: XLA gives more, and the handler checks it.
ALIGNMENT = 16

#: Within ``explaining``: the decisions for all kernels of what is compiled. Nothing is loaded then.
decisions: ContextVar[list[Decision] | None] = ContextVar(
    "scan_registry.jax.decisions", default=None
)

#: A shape and a dtype, by its name.
Outline = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Selection:
    """What one kernel is selected by; ``backend`` is the language, ``lowest`` the lowest tier that is allowed."""

    family: Family
    problem: Problem
    backend: Backend
    lowest: Tier


@dataclass(frozen=True)
class CpuFunction:
    """A function of the C code for CPUs, and its arguments beside the addresses and the number of threads.

    pointers  the names of its pointers, in order
    before    arguments before the tuple of addresses
    numbers   the tuple after that
    after     arguments after the number of threads
    of        the problem that it solves
    """

    name: str
    pointers: tuple[str, ...]
    before: tuple[str, ...]
    numbers: tuple[int, ...]
    after: tuple[Any, ...]
    of: Selection


def call_on_cpu(
    function: CpuFunction,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Outline | None],
    starts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The arrays that a function writes, by the names of its pointers. ``starts`` are what outputs hold before."""
    if (recorded := decisions.get()) is not None:
        of = function.of
        recorded.append(loader.decide(None, of.family, of.problem, of.backend, Tier.REFERENCE))
    words = {
        "cpu": function.name,
        "before": function.before,
        "numbers": function.numbers,
        "after": function.after,
    }
    return _call(words, function.pointers, inputs, outputs, starts or {})


def call_on_gpu(
    kernel: Selection,
    inputs: Mapping[str, Any],
    outputs: Callable[[Mapping[str, int]], Mapping[str, Outline | None]],
    starts: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The arrays that a kernel writes, by the names of its pointers; None if no kernel runs on this GPU, and plain JAX may.
    ``outputs`` takes the integer parameters of the launch."""
    ordinal = first_gpu()
    how = ordinal, kernel.family, kernel.problem, kernel.backend, kernel.lowest
    if (recorded := decisions.get()) is not None:
        decision = loader.decide(*how)
        recorded.append(decision)
        shape = decision.launch()
        # What is compiled is not run.
        return (
            None
            if shape is None
            else {n: jnp.zeros(*o) for n, o in outputs(shape.scalars).items() if o is not None}
        )
    plan = loader.prepare(*how)
    shape, binary = plan.decision.launch(), plan.binary
    if plan.launch is None or shape is None or binary is None:
        _warn(plan.decision)
        return None
    of = kernel.family.kernel(binary.variant.kernel, binary.variant.language)
    words = {
        "gpu": str(binary.variant),
        "target": str(binary.target),
        "sha256": binary.sha256,
        "grid": shape.grid,
        "scalars": dict(shape.scalars),
        "workspace": shape.workspace,
        "zeroed": shape.zeroed,
    }
    written = dict(outputs(shape.scalars))
    if shape.workspace:
        written["workspace"] = (shape.workspace,), "uint8"
    launch = plan.launch
    return _call(
        words,
        of.pointers,
        inputs,
        written,
        starts or {},
        lambda text: _LAUNCHES.update({(ordinal, text): launch}),
    )


def in_order(
    written: Mapping[str, Any] | None, outputs: Mapping[str, Outline | None]
) -> list[Any] | None:
    """What was written of ``outputs``, in their order; None if no kernel ran."""
    if written is None:
        return None
    return [written[name] for name, outline in outputs.items() if outline is not None]


def _call(
    words: Mapping[str, Any],
    pointers: Sequence[str],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Outline | None],
    starts: Mapping[str, Any],
    announce: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    _register()
    arguments = {name: inputs[name] for name in pointers if inputs.get(name) is not None}
    results = {name: outline for name, outline in outputs.items() if outline is not None}
    first = len(arguments)
    started = [name for name in results if starts.get(name) is not None]
    places = [
        [*arguments].index(name)
        if name in arguments
        else -1 - [*results].index(name)
        if name in results
        else None
        for name in pointers
    ]
    text = json.dumps({**words, "places": places}, separators=(",", ":"))
    announce(text)
    shapes = [_struct(shape, dtype) for shape, dtype in results.values()]
    aliases = {first + i: [*results].index(name) for i, name in enumerate(started)}
    call = jax.ffi.ffi_call(TARGET, shapes, input_output_aliases=aliases)
    written = call(
        *arguments.values(),
        *(starts[name] for name in started),
        key=sha256(text.encode()).hexdigest(),
        call=text,
    )
    return dict(zip(results, written, strict=True))


#: JAX's own, which has no types for mypy.
_struct: Any = jax.ShapeDtypeStruct
_capsule: Any = jax.ffi.pycapsule

# --- The handler's side -----------------------------------------------------------------------

#: Launches that this process planned, by the ordinal and the text of a call.
_LAUNCHES: dict[tuple[int, str], _launcher.Launch] = {}


@cache
def _register() -> None:
    """Tell XLA of the handlers, once."""
    for platform, address in zip(PLATFORMS, _launcher.xla_handlers(_resolve), strict=True):
        capsule = _capsule(address)
        jax.ffi.register_ffi_target(
            TARGET, capsule, platform=platform.upper() if platform == "cuda" else platform
        )


def _resolve(text: str, ordinal: int) -> tuple[Any, ...]:
    """What a call's text stands for, as ``_launcher.xla_handlers`` takes it."""
    words = json.loads(text)
    places = tuple(words["places"])
    if "cpu" in words:
        numbers, after = tuple(words["numbers"]), tuple(words["after"])
        function = getattr(_cpu, words["cpu"])
        return function, places, tuple(words["before"]), (numbers, threads(), *after), 1
    launch = _LAUNCHES.get((ordinal, text))
    if launch is None:
        shape = Launch(tuple(words["grid"]), words["scalars"], words["workspace"], words["zeroed"])
        variant, target = Variant.parse(words["gpu"]), Target.parse(words["target"])
        launch = loader.launch_again(ordinal, variant, target, words["sha256"], shape)
    return launch, places, (), (), ALIGNMENT


def threads() -> int:
    """How many threads a function for CPUs may take: ``OMP_NUM_THREADS``, or as many as this process has processors."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else len(os.sched_getaffinity(0))


@cache
def first_gpu() -> int:
    """The ordinal of the GPU that programs are compiled for. They run on others of its kind, too."""
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:  # a program is compiled for GPUs on a machine whose JAX has none
        return 0
    return int(gpus[0].local_hardware_id or 0)


def gpu() -> Device:
    """What is known of that GPU."""
    return device(first_gpu())


_warned: set[tuple[str, str]] = set()


def _warn(decision: Decision) -> None:
    """Say once for each kernel that JAX's own operators stand in for it."""
    key = decision.family.name, decision.problem.kernel
    if decision.backend == "reference" or key in _warned:
        return
    _warned.add(key)
    warnings.warn(
        f"{decision.family.name}.{decision.problem.kernel} runs on tier reference: operators of JAX stand in for it. "
        f"{advice(decision)}; `scan-registry doctor` tells more",
        FallbackWarning,
        stacklevel=2,
    )


def outline_of(array: Any) -> Outline:
    """An array's shape and dtype."""
    return tuple(array.shape), str(jnp.dtype(array.dtype))
