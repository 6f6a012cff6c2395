"""Random problems for the linear_scan kernels, with what the float64 reference makes of them.

``selftest`` and ``tools/attest.py`` run binaries on these one by one, so every pointer parameter and
every option of every kernel is covered, whether or not a public function passes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.kernels import cases
from scan_registry.kernels.cases import (
    Options,
    on_device,
    random_cu_seqlens,
    relative_error,
    with_gaps,
)
from scan_registry.kernels.linear_scan import gates_sum, reference
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
)
from scan_registry.kernels.linear_scan.spec import DIRECTIONS, LAYOUTS

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {
    "float32": 1e-6,
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float64": 1e-14,
    "complex64": 2e-6,
}

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Setting(Options):
    """The options of a problem.

    states     whether there are states before and after the scan, and gradients of them
    packed     whether sequences are packed along time, empty ones among them
    broadcast  the dimensions, of outer, batch, channel and time, along which gates are broadcast
    mixed      whether gates are float32 whatever the dtype
    outer      how many of the batches the outer dimension takes
    lasting    whether gates are so close to 1 that the first step reaches the last
    """

    states: bool = False
    reverse: bool = False
    packed: bool = False
    broadcast: tuple[str, ...] = ()
    mixed: bool = False
    outer: int = 1
    lasting: bool = False


PLAIN = (Setting(), Setting(states=True), Setting(reverse=True), Setting(True, True))
OPTIONS = (
    Setting(packed=True),
    Setting(states=True, packed=True),
    Setting(states=True, packed=True, reverse=True),
    Setting(states=True, broadcast=("time",)),
    Setting(states=True, broadcast=("outer", "batch", "time"), outer=2),
    Setting(reverse=True, broadcast=("channel",), outer=2),
    Setting(states=True, packed=True, broadcast=("batch",)),
    Setting(states=True, packed=True, broadcast=("time",)),
    Setting(broadcast=("outer", "batch", "channel", "time")),
    Setting(states=True, mixed=True),
    Setting(states=True, mixed=True, broadcast=("channel", "time"), reverse=True, packed=True),
)

#: (batch, channels, time) of a quick check, and of an attestation: few and many rows, one step and
#: very many, primes, powers of two and their neighbours. Which options a shape is tried with goes by its
#: place: sums that do not decay, of gates that stay the same, are as short as to be right step by step in
#: float32, as the CPU makes them.
QUICK: tuple[Shape, ...] = ((2, 5, 700), (4, 33, 257), (2, 64, 1024), (2, 80, 4112), (2, 48, 1))
#: Few that reach every kernel: also that of narrow rows, which takes many batches, that of few channels with one gate, that of long rows
#: with one gate, whose gradient is summed from 4096 steps on, and those of such rows, and of few channels, that fit shared memory.
SMALL: tuple[Shape, ...] = (
    *QUICK,
    (66, 21, 40),
    (200, 21, 40),
    (1, 1101, 513),
    (2, 34, 1100),
    (1, 1729, 513),
    (100, 2, 4096),
)
THOROUGH: tuple[Shape, ...] = (
    (1, 1, 1),
    (1, 7, 2),
    (6, 13, 3),
    (1000, 100, 1),
    (100, 1000, 16),
    (16, 64, 31),
    (4, 257, 127),
    (2, 1536, 128),
    (8, 129, 129),
    (4, 16, 509),
    (2, 96, 512),
    (2, 1000, 1023),
    (8, 64, 1024),
    (4, 65, 1025),
    (2, 128, 2048),
    (2, 31, 4099),
    (1, 256, 8192),
    (1, 16, 32752),
    (1, 1, 131071),
    (6, 8, 50),
    (4, 5, 700),
    (2, 3, 33),
    (66, 21, 300),
    (200, 21, 70),
    (1, 1101, 700),
    (1, 1729, 600),
    (100, 2, 4096),
)
#: The longest scan that options are tried on: the reference takes it step by step.
_LONG = 5000

_KERNELS: dict[str, tuple[Layout, Direction]] = {
    f"{layout}_{direction}": (layout, direction) for layout in LAYOUTS for direction in DIRECTIONS
}
_SEQUENCES = ("gates", "tokens", "states", "states_grad", "gates_grad", "tokens_grad")

#: What each direction writes.
OUTPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("states", "final_state"),
    "backward": ("gates_grad", "tokens_grad", "initial_state_grad"),
    "reduction": ("gates_grad",),
    "summary": ("final_gate", "final_state"),
}
#: Of states, the sequence that they are steps of.
SEQUENCE_OF = {"final_state": "states", "initial_state_grad": "tokens_grad"}


def wide(tensor: Tensor) -> Tensor:
    """In float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass(frozen=True)
class Case(cases.Case):
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect."""

    problem: LinearScanProblem | gates_sum.GatesSumProblem

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        """States are steps of a sequence, and may be few of them."""
        among = self.expected.get(SEQUENCE_OF.get(name, ""))
        if self.problem.direction == "summary" and name == "final_state":
            among = self.tensors["tokens"]
        if self.problem.direction == "reduction":
            out = out.sum(0)
        elif self.problem.sums and name == "gates_grad":
            # A launch may leave fewer sums than there is room for.
            out = out[~out.isnan().all(1)].sum(0)
        return relative_error(out.view(expected.shape), expected, among)


class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64 or complex128.

    Sequences are (outer, batch, channels, time), with 1 where gates are broadcast; states are (outer,
    batch, channels), and where sequences are packed (outer, batch, channels, sequences).
    """

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that ``kernel`` can compute this by."""
        if kernel == gates_sum.NAME:
            yield from self._totals()
            return
        yield from (self.case(kernel, aligned=aligned) for aligned in (True, False))
        constant = "time" in self.setting.broadcast and self.shape[2] > 1
        if _KERNELS[kernel][1] == "backward" and constant:
            yield self.case(kernel, aligned=True, sums=True)

    def case(self, kernel: str, *, aligned: bool, sums: bool = False) -> Case:
        """The launch of ``kernel`` that computes this, in memory laid out as it wants. A backward
        kernel gives gates that are broadcast no gradient, or ``sums`` over time of one for each state;
        a reduction does."""
        layout, direction = _KERNELS[kernel]
        if direction == "summary" and "final_gate" not in self.expected:
            return self._summarized().case(kernel, aligned=aligned)
        expected = self._expected(direction, sums)
        tensors: dict[str, Tensor | None] = {
            name: _copied(name, tensor, layout, aligned)
            for name, tensor in self.inputs.items()
            if name not in OUTPUTS[direction]
        }
        for name, value in expected.items():
            if direction != "reduction" and not (sums and name == "gates_grad"):
                tensors[name] = self._poison(name, value, layout, aligned)
        sequences = {n: t for n, t in tensors.items() if t is not None and n in _SEQUENCES}
        outer, batch, channels, time = self._full
        problem = LinearScanProblem(
            direction=direction,
            layout=layout,
            dtype=self.dtype,
            gates_dtype=self._gates_dtype,
            outer=outer,
            batch=batch,
            channels=channels,
            time=time,
            sequences=self._sequences,
            reverse=self.setting.reverse,
            strides=self._strides(direction, sequences),
            alignment=common_alignment(t.data_ptr() for t in sequences.values()),
            sums=sums,
            has_states=self.setting.states and self._sequences > 0,
        )
        if sums:
            pieces = problem.sum_pieces(), expected["gates_grad"].numel()
            tensors["gates_grad"] = self._poison("state", expected["gates_grad"].new_empty(pieces))
        if direction == "reduction":
            pieces = (problem.reduction().pieces, *expected["gates_grad"].shape)
            tensors["gates_grad"] = self._poison("state", expected["gates_grad"].expand(pieces))
        return Case(problem, tensors, expected)

    def _totals(self) -> Iterator[Case]:
        """Of few and of many sums for each state, over what gates are broadcast along."""
        dtype = reference.compute_dtype(getattr(torch, self.dtype))
        device = self.expected["states"].device
        for pieces in (3, max(3, 2**17 // math.prod(self._state_shape))):
            sums = torch.rand((pieces, *self._state_shape), device=device).to(dtype)
            sizes = zip(("outer", "batch", "channel"), self._full[:3], strict=True)
            gates = [1 if name in self.setting.broadcast else size for name, size in sizes]
            if self._sequences:
                gates.append(1)
            name = str(dtype).removeprefix("torch.")
            problem = gates_sum.problem_of(sums.shape, sums.stride(), gates, name, name)
            if problem is None:
                continue
            total = wide(sums).sum_to_size(gates)
            tensors: dict[str, Tensor | None] = {
                "sums": sums,
                "gates_grad": torch.full_like(total, torch.nan, dtype=dtype),
            }
            yield Case(problem, tensors, {"gates_grad": total})

    def _expected(self, direction: Direction, sums: bool) -> dict[str, Tensor]:
        if direction == "reduction":
            return {"gates_grad": self.expected["reduced_gates_grad"]}
        expected = {name: self.expected[name] for name in OUTPUTS[direction]}
        if sums:
            expected["gates_grad"] = self.expected["gates_grad_sums"]
        elif self.setting.broadcast:
            expected.pop("gates_grad", None)
        if not self.setting.states:
            expected.pop("initial_state_grad", None)
        return expected

    def _strides(self, direction: Direction, sequences: dict[str, Tensor]) -> tuple[Strides, ...]:
        strides = {n: Strides(*t.expand(self._full).stride()) for n, t in sequences.items()}
        strides["grads"] = strides.get("tokens_grad", Strides(0, 0, 0, 0))
        strides["state"] = _state_strides(self._state_shape)
        if direction == "reduction":
            gates = sequences["gates"].contiguous()
            strides["gates_grad"] = Strides(*gates.expand(self._full).stride())
        return tuple(strides[name] for name in STRIDED[direction])

    def _summarized(self) -> Trial:
        """A summary knows no states before the scan, and takes packed sequences for one."""
        inputs = {n: t if n in ("gates", "tokens") else None for n, t in self.inputs.items()}
        expected = {
            name: self.expected[f"summary_{name}"].contiguous() for name in OUTPUTS["summary"]
        }
        return replace(self, inputs=inputs, expected=expected)

    @property
    def _full(self) -> tuple[int, int, int, int]:
        batch, channels, time = self.shape
        return self.setting.outer, batch // self.setting.outer, channels, time

    @property
    def _sequences(self) -> int:
        offsets = self.inputs["offsets"]
        return 0 if offsets is None else len(offsets) - 1

    @property
    def _state_shape(self) -> tuple[int, ...]:
        return (*self._full[:3], *([self._sequences] if self._sequences else []))

    @property
    def _gates_dtype(self) -> str:
        return "float32" if self.setting.mixed else self.dtype

    def _poison(
        self, name: str, like: Tensor, layout: Layout = "time_last", aligned: bool = True
    ) -> Tensor:
        """Room for an output, full of NaN; final states of empty sequences are the initial ones, and
        so with their gradients, which the kernels leave alone."""
        dtype = getattr(torch, self._gates_dtype if name == "gates_grad" else self.dtype)
        if name in _SEQUENCES:
            return _placed(torch.full_like(like, torch.nan, dtype=dtype), layout, aligned)
        out = torch.full_like(like, torch.nan, dtype=reference.compute_dtype(dtype))
        source = {"final_state": "initial_state", "initial_state_grad": "final_state_grad"}.get(
            name
        )
        offsets = self.inputs["offsets"]
        if source and offsets is not None:
            entering = self.inputs[source]
            empty = offsets.diff() == 0
            out[..., empty] = 0 if entering is None else entering[..., empty]
        return out


def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs: gates of |gate| ≤ 1, many of them close to 1; the rest
    normal. Drawn, and solved in float64, on the CPU: only the kernels under test run on ``device``."""
    batch, channels, time = shape
    full = (setting.outer, batch // setting.outer, channels, time)
    narrow = getattr(torch, dtype)
    state_dtype = reference.compute_dtype(narrow)
    of_gates = [
        1 if name in setting.broadcast else size
        for name, size in zip(("outer", "batch", "channel", "time"), full, strict=True)
    ]
    gates = torch.rand(of_gates, dtype=torch.float64)
    gates = 1 - (gates / time if setting.lasting else gates**3)
    if narrow.is_complex:
        gates = torch.polar(gates, 6.28 * torch.rand(of_gates, dtype=torch.float64))
    gates = gates.to(torch.float32 if setting.mixed else narrow)
    # Small enough that the sum over all steps of a scan, squared, is within float16's range.
    size = 1 / 32 if setting.broadcast else 1
    tokens, states_grad = (size * torch.randn(full, dtype=narrow) for _ in range(2))
    if len(setting.broadcast) == len(full):  # one sum of everything, which must not cancel
        tokens, states_grad = tokens.abs().to(narrow), states_grad.abs().to(narrow)
    offsets = random_cu_seqlens(time) if setting.packed else None
    initial = final_grad = None
    if setting.states:
        of_state = full[:3] if offsets is None else (*full[:3], len(offsets) - 1)
        initial, final_grad = (torch.randn(of_state, dtype=state_dtype) for _ in range(2))
    wide_initial, wide_final_grad = (None if t is None else wide(t) for t in (initial, final_grad))
    options: dict[str, Any] = {"reverse": setting.reverse, "cu_seqlens": offsets}
    states, final_state = reference.forward(wide(gates), wide(tokens), wide_initial, **options)
    grads = reference.backward(
        wide(gates), states, wide(states_grad), wide_initial, wide_final_grad, **options
    )
    gates_grad, tokens_grad, initial_grad = grads
    # The backward pass gets the states, and the reduction the gradient too, as they were rounded.
    inputs = {
        "gates": gates,
        "tokens": tokens,
        "initial_state": initial,
        "states": states.to(narrow),
        "states_grad": states_grad,
        "final_state_grad": final_grad,
        "tokens_grad": tokens_grad.to(narrow),
        "offsets": offsets,
    }
    before = reference.preceding(wide(states.to(narrow)), wide_initial, **options)
    products = wide(tokens_grad.to(narrow)) * before.conj()
    expected = {
        "states": states,
        "final_state": final_state,
        "gates_grad": gates_grad,
        "tokens_grad": tokens_grad,
        "initial_state_grad": initial_grad,
        "reduced_gates_grad": products.sum_to_size(of_gates),
        "gates_grad_sums": _sums(tokens_grad * before.conj(), offsets),
        **_summary(wide(gates).expand(full), wide(tokens), setting.reverse),
    }
    return Trial(
        shape,
        setting,
        dtype,
        inputs=on_device(inputs, device),
        expected=on_device(expected, device),
    )


def _sums(products: Tensor, offsets: Tensor | None) -> Tensor:
    """Over time, or over each of the packed sequences."""
    if offsets is None:
        return products.sum(-1)
    pairs = zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
    return torch.stack([products[..., first:end].sum(-1) for first, end in pairs], -1)


def _summary(gates: Tensor, tokens: Tensor, reverse: bool) -> dict[str, Tensor]:
    """The product of all gates, and the sum of all tokens, each times the gates of the steps after it."""
    if reverse:
        gates, tokens = gates.flip(-1), tokens.flip(-1)
    from_step = gates.flip(-1).cumprod(-1).flip(-1)
    after = torch.cat([from_step[..., 1:], torch.ones_like(gates[..., :1])], -1)
    return {
        "summary_final_gate": from_step[..., 0],
        "summary_final_state": (after * tokens).sum(-1),
    }


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two plain trials per shape, and two with options where that takes no hour, all in turn."""
    plain, options = cycle(PLAIN), cycle(OPTIONS)
    for shape in shapes:
        chosen = [next(plain), next(plain)]
        if shape[2] <= _LONG:
            chosen += [next(options), next(options), next(options)]
        for setting in chosen:
            if setting.mixed and dtype not in ("bfloat16", "float16"):
                continue
            if shape[0] % setting.outer == 0:
                yield draw(shape, setting, dtype, device)


def _state_strides(shape: tuple[int, ...]) -> Strides:
    strides = torch.empty(shape, device="meta").stride()
    outer, batch, channel, *between = strides
    return Strides(outer, batch, channel, *(between or [0]))


def _copied(name: str, tensor: Tensor | None, layout: Layout, aligned: bool) -> Tensor | None:
    """A sequence ``_placed``, another tensor as it is."""
    return tensor if tensor is None or name not in _SEQUENCES else _placed(tensor, layout, aligned)


def _placed(tensor: Tensor, layout: Layout, aligned: bool) -> Tensor:
    """A copy with the layout's dimension contiguous; unless ``aligned``, off the 16-byte grid and with
    gaps between its rows."""
    order = (0, 1, 2, 3) if layout == "time_last" else (0, 1, 3, 2)
    return with_gaps(tensor.permute(order), 0 if aligned else 3).permute(order)
