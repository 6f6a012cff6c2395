"""Random problems for the rnn kernels, with what the float64 reference makes of them.

``selftest`` and ``tools/attest.py`` run binaries on these one by one, so that every pointer parameter and
every option of every kernel is covered, whether or not a public function passes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from scan_registry.kernels import cases
from scan_registry.kernels.cases import Options, in_float64, on_device, relative_error, there
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.problem import (
    SIZES,
    STRIDED,
    Clips,
    Direction,
    Function,
    RnnProblem,
    Scope,
)

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}

Shape = tuple[int, int, int, int]

#: (batch, time, heads, units) of a quick check, and of an attestation: one step and many, batches and
#: heads that fill no tile, one block for a head and many.
QUICK: tuple[Shape, ...] = ((2, 1, 1, 16), (7, 33, 3, 64), (16, 65, 1, 256))
#: Heads of one CTA, the narrowest for Triton in float32; and heads of several CTAs, which exchange more steps than their ring
#: holds, or wait for each other several times in a step, in float32 and in 16 bits.
SMALL: tuple[Shape, ...] = (
    *((9, 5, 2, 64), (9, 5, 2, 32), (9, 35, 1, 128), (9, 5, 1, 640), (2, 2, 1, 1280)),
)
THOROUGH: tuple[Shape, ...] = (
    *((1, 1, 1, 16), (2, 2, 3, 32), (7, 3, 12, 48), (65, 17, 1, 64), (16, 257, 12, 64)),
    *((16, 129, 3, 256), (5, 64, 1, 400), (16, 257, 1, 768)),
)


@dataclass(frozen=True)
class Setting(Options):
    """The options of a problem.

    starts  whether there are states before the first step
    ends    whether the last states have gradients of their own
    graded  whether all states have gradients, and not h alone
    resets  whether states start anew here and there
    steady  whether all steps of all batches get the same inputs, and f keeps most of a state
    clips   what is clipped
    """

    starts: bool = False
    ends: bool = False
    graded: bool = False
    resets: bool = False
    steady: bool = False
    clips: Clips = Clips()  # noqa: RUF009


SETTINGS = (
    Setting(),
    Setting(starts=True, ends=True),
    Setting(starts=True, graded=True),
    Setting(starts=True, ends=True, graded=True, clips=Clips(0.5, 0.25)),
    Setting(ends=True, clips=Clips(recurrent_cut=True)),
    Setting(starts=True, ends=True, resets=True),
)

_KERNELS: dict[str, tuple[Scope, Direction]] = {
    f"{scope}_{direction}": (scope, direction) for scope, direction in STRIDED
}
#: Of what kernels write, what has the states in front; each of them counts by itself.
_BY_STATE = ("states", "carry", "initial_grad")
_GAP = 16  # elements between rows that have gaps


@dataclass(frozen=True)
class Case(cases.Case):
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect."""

    problem: RnnProblem

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        if name in _BY_STATE:
            return max(map(relative_error, out, expected))
        if name == "cache" and self.problem.function == "slstm":
            out, expected = _factors(out), _factors(expected)
        return relative_error(out, expected)


def _factors(cache: Tensor) -> Tensor:
    """What sLSTM keeps, with both factors in place of the one that is not 1, whose sign tells which it
    is: where they are nearly equal, so are the factors, and either sign is right."""
    lesser, others = cache.narrow(-3, 0, 1), cache.narrow(-3, 1, cache.shape[-3] - 1)
    one, elsewhere = torch.ones_like(lesser), lesser.signbit()
    of_input = torch.where(elsewhere, -lesser, one)
    of_state = torch.where(elsewhere, one, lesser)
    return torch.cat([of_input, of_state, others], -3)


@dataclass(frozen=True)
class Trial(cases.Trial):
    """Inputs of one problem in one dtype, and the results in float64, by kernel."""

    function: Function
    shape: Shape
    setting: Setting
    dtype: str
    inputs: dict[tuple[Scope, Direction], dict[str, Tensor | None]]
    expected: dict[tuple[Scope, Direction], dict[str, Tensor]]

    def __str__(self) -> str:
        return f"{self.function} {self.shape} {self.setting}".strip()

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this, in memory of its own; unless ``aligned``, with gaps
        between batches, steps and states."""
        scope, direction = _KERNELS[kernel]
        narrow = getattr(torch, self.dtype)
        strided = STRIDED[scope, direction]
        tensors: dict[str, Tensor | None] = {}
        expected = self.expected[scope, direction]
        for name, value in self.inputs[scope, direction].items():
            tensors[name] = (
                None if value is None else _placed(name, value, name in strided, aligned)
            )
        for name, value in expected.items():
            if name == "carry":
                continue  # which is read first
            poison = torch.full_like(value, torch.nan, dtype=narrow)
            tensors[name] = _placed(name, poison, name in strided, aligned)
        strides = []
        for name, dimensions in strided.items():
            tensor = tensors.get(name)
            along = (0, 0, 0) if tensor is None else tensor.stride()
            strides += [along[number] for number in range(len(dimensions))]
        grad = tensors.get("states_grad")
        problem = RnnProblem(
            *(scope, direction, self.function, self.dtype),
            *self.shape,
            strides=tuple(strides),
            graded=0 if grad is None else len(grad),
            training=True,
            clips=self.setting.clips,
            resets=tensors.get("reset") is not None,
        )
        return Case(problem, tensors, expected)


def _placed(name: str, tensor: Tensor, strided: bool, aligned: bool) -> Tensor:
    """A copy; with gaps, where a kernel has strides."""
    if aligned or not strided:
        return tensor.clone(memory_format=torch.contiguous_format)
    of_states = "states" in name or name == "before"
    block = tensor.shape[-2 if of_states else -3 :]
    rows, length = tensor.shape[: -len(block)], block.numel()
    memory = tensor.new_empty(*rows, length + _GAP)
    placed: Tensor = memory[..., :length].unflatten(-1, block)
    return placed.copy_(tensor)


def draw(
    function: Function, shape: Shape, setting: Setting, dtype: str, device: torch.device | str
) -> Trial:
    """Fresh random inputs. Drawn, and solved in float64, on the CPU: only the kernels under test run on
    ``device``."""
    batch, time, heads, dim = shape
    sizes, narrow = SIZES[function], getattr(torch, dtype)
    states, unit = len(sizes.states), (heads, dim)

    def new(*size: int, by: float = 1.0) -> Tensor:
        return (torch.randn(size) * by).to(narrow)

    graded = states if setting.graded else 1
    if function == "slstm" and dtype != "float32":
        graded = 1  # what enters by m goes to i or f, and rounding decides which
    inputs_of_all: dict[str, Tensor | None] = {
        "inputs": new(batch, time, sizes.inputs, *unit),
        "recurrent": new(sizes.recurrent, heads, dim, dim, by=dim**-0.5),
        "bias": new(sizes.bias, *unit).float(),
        "initial": new(states, batch, *unit) if setting.starts else None,
        "states_grad": new(graded, batch, time, *unit),
        "final_grad": None,
        "reset": torch.rand(batch, time) < 1 / 8 if setting.resets else None,
    }
    if setting.ends:
        final = new(states, batch, *unit)
        final[graded:] = 0
        inputs_of_all["final_grad"] = final
    if setting.steady:
        inputs, bias = there(inputs_of_all["inputs"]), there(inputs_of_all["bias"])
        inputs.copy_(inputs[:1, :1].clone())
        bias[1] += 4
    if function == "slstm" and setting.starts:
        initial = there(inputs_of_all["initial"])
        initial[2] = initial[2].abs() + 1
        initial[1:3, ..., ::3] = 0  # where i decides
    of_kernels, expected = _solved(function, setting, inputs_of_all, narrow)
    moved = {key: on_device(of_kernel, device) for key, of_kernel in of_kernels.items()}
    wanted = {key: on_device(of_kernel, device) for key, of_kernel in expected.items()}
    return Trial(function, shape, setting, dtype, moved, wanted)


def _solved(
    function: Function, setting: Setting, drawn: dict[str, Tensor | None], narrow: torch.dtype
) -> tuple[
    dict[tuple[Scope, Direction], dict[str, Tensor | None]],
    dict[tuple[Scope, Direction], dict[str, Tensor]],
]:
    """What each kernel takes, and what it is to make of that."""
    sizes, clips = SIZES[function], setting.clips
    wide = in_float64(drawn)
    reset = drawn["reset"]
    x, r, b, grad = (there(wide[name]) for name in ("inputs", "recurrent", "bias", "states_grad"))
    states, cache = reference.forward(function, x, r, b, wide["initial"], clips, reset)
    gates_grad, initial_grad = reference.backward(
        function, r, states, wide["initial"], cache, grad, wide["final_grad"], clips, reset=reset
    )
    kept = cache.to(narrow) if sizes.cache else None
    back: dict[str, Tensor | None] = {"states": states.to(narrow), "cache": kept}
    forward = {name: drawn[name] for name in ("inputs", "recurrent", "bias", "initial", "reset")}
    backward = {
        name: drawn[name] for name in ("recurrent", "initial", "reset", "states_grad", "final_grad")
    }
    inputs: dict[tuple[Scope, Direction], dict[str, Tensor | None]] = {
        ("sequence", "forward"): forward,
        ("sequence", "backward"): backward | back,
    }
    of_cache = {"cache": cache} if sizes.cache else {}
    expected: dict[tuple[Scope, Direction], dict[str, Tensor]] = {
        ("sequence", "forward"): {"states": states, **of_cache},
        ("sequence", "backward"): {"gates_grad": gates_grad, "initial_grad": initial_grad},
    }
    _solve_step(function, setting, drawn, states, inputs, expected)
    return inputs, expected


def _solve_step(
    function: Function,
    setting: Setting,
    drawn: dict[str, Tensor | None],
    states: Tensor,
    inputs: dict[tuple[Scope, Direction], dict[str, Tensor | None]],
    expected: dict[tuple[Scope, Direction], dict[str, Tensor]],
) -> None:
    """The first step of the same: R·h is drawn, and the states before it are in float32."""
    sizes, clips = SIZES[function], setting.clips
    x, bias, grad = (there(drawn[name]) for name in ("inputs", "bias", "states_grad"))
    batch, _, _, heads, dim = x.shape
    initial = drawn["initial"]
    before = torch.zeros_like(states[:, :, 0]) if initial is None else initial.double()
    terms = torch.randn(heads, batch, sizes.recurrent, dim).to(x.dtype)
    outputs = reference.step(
        function,
        x[:, 0].double(),
        terms.permute(1, 2, 0, 3).double(),
        bias.double(),
        before.unbind(0),
        clips.forward,
    )
    after = torch.stack(tuple(outputs.states))
    cache = torch.stack(tuple(outputs.cache), 1) if sizes.cache else None
    inputs["step", "forward"] = {
        "inputs": x[:, 0],
        "terms": terms,
        "bias": bias,
        "carry": before.float(),
    }
    of_cache = {} if cache is None else {"cache": cache}
    expected["step", "forward"] = {"states": after, "carry": after, **of_cache}
    carried = torch.randn(after.shape)
    carried[len(grad) :] = 0
    through = None if clips.recurrent_cut else torch.randn(heads, batch, dim).to(x.dtype)
    grads = carried.double()
    grads[: len(grad)] += grad[:, :, 0].double()
    if through is not None:
        grads[0] += through.double().transpose(0, 1).clamp(-clips.recurrent, clips.recurrent)
    back = reference.step_back(
        function,
        () if cache is None else cache.unbind(1),
        before.unbind(0),
        after.unbind(0),
        grads.unbind(0),
    )
    inputs["step", "backward"] = {
        "terms": through,
        "before": None if initial is None else initial,
        "states": after.to(x.dtype),
        "cache": None if cache is None else cache.to(x.dtype),
        "states_grad": grad[:, :, 0],
        "carry": carried,
    }
    expected["step", "backward"] = {
        "gates_grad": torch.stack(tuple(back.gates), 1),
        "carry": torch.stack(tuple(back.states)),
    }


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two settings for each shape and cell, all in turn."""
    settings = cycle(SETTINGS)
    for shape in shapes:
        for function in SIZES:
            for _ in range(2):
                yield draw(function, shape, next(settings), dtype, device)
