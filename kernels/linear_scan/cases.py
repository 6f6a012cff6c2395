"""Random problems for the linear_scan kernels, with what the float64 reference makes of them.

``selftest`` and ``tools/attest.py`` run binaries on these one by one, so every pointer parameter of
every kernel is covered, whether or not a public function passes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
    common_alignment,
)
from scan_registry.kernels.linear_scan.spec import DIRECTIONS, LAYOUTS

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as proven.
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}

Shape = tuple[int, int, int]

#: (batch, channels, time) of a quick check, and of an attestation: few and many rows, one step and
#: very many, primes, powers of two and their neighbours.
QUICK: tuple[Shape, ...] = ((2, 48, 1), (3, 33, 257), (2, 64, 1024), (1, 80, 4112))
THOROUGH: tuple[Shape, ...] = (
    (1, 1, 1),
    (1, 7, 2),
    (5, 13, 3),
    (1000, 100, 1),
    (100, 1000, 16),
    (16, 64, 31),
    (3, 257, 127),
    (2, 1536, 128),
    (7, 129, 129),
    (4, 16, 509),
    (2, 96, 512),
    (1, 1000, 1023),
    (8, 64, 1024),
    (3, 65, 1025),
    (2, 128, 2048),
    (2, 31, 4099),
    (1, 256, 8192),
    (1, 16, 32752),
    (1, 1, 131071),
)

_KERNELS: dict[str, tuple[Layout, Direction]] = {
    f"{layout}_{direction}": (layout, direction) for layout in LAYOUTS for direction in DIRECTIONS
}
_SEQUENCES = ("states", "gates_grad", "tokens_grad")

#: What each direction writes.
OUTPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("states", "final_state"),
    "backward": ("gates_grad", "tokens_grad", "initial_state_grad"),
}


def relative_error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; infinite where ``out`` holds a NaN."""
    error = (out.detach().double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(error.nan_to_num(nan=torch.inf))


@dataclass(frozen=True)
class Case:
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect."""

    problem: LinearScanProblem
    tensors: dict[str, Tensor | None]
    expected: dict[str, Tensor]

    def error(self) -> float:
        """‖out − ref‖ / ‖ref‖ of the worst output; infinite if one was not wholly written."""
        worst = 0.0
        for name, expected in self.expected.items():
            out = self.tensors[name]
            assert out is not None
            worst = max(worst, relative_error(out, expected))
        return worst


@dataclass(frozen=True)
class Trial:
    """Inputs of one problem in one dtype, and the float64 results.

    Sequences are (batch, channels, time), states (batch, channels); a problem without states of its
    own before and after the scan has None there.
    """

    shape: Shape
    dtype: str
    inputs: dict[str, Tensor | None]
    expected: dict[str, Tensor]

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this, in memory laid out as it wants."""
        layout, direction = _KERNELS[kernel]
        outputs = OUTPUTS[direction]
        if self.inputs["initial_state"] is None:
            outputs = tuple(name for name in outputs if name in _SEQUENCES)
        expected = {name: self.expected[name] for name in outputs}
        dtype = getattr(torch, self.dtype)
        poison = {
            name: torch.full_like(value, torch.nan, dtype=dtype) for name, value in expected.items()
        }
        tensors = {
            name: _placed(value, layout, aligned)
            if value is not None and value.dim() == 3
            else value
            for name, value in (self.inputs | poison).items()
        }
        strided = [
            tensor
            for name in STRIDED[direction]
            if (tensor := tensors["gates_grad" if name == "grads" else name]) is not None
        ]
        initial = self.inputs["initial_state"]
        aligned_alike = strided if initial is None else [*strided, initial]
        batch, channels, time = self.shape
        problem = LinearScanProblem(
            direction=direction,
            layout=layout,
            dtype=self.dtype,
            batch=batch,
            channels=channels,
            time=time,
            strides=tuple(Strides(*tensor.stride()) for tensor in strided),
            alignment=common_alignment(tensor.data_ptr() for tensor in aligned_alike),
        )
        return Case(problem, tensors, expected)

    def reference_errors(self) -> dict[str, float]:
        """Error of the reference in the trial's own dtype, by direction."""
        given, wide = self.inputs, self.expected
        gates, tokens, states, grad = (
            given[name] for name in ("gates", "tokens", "states", "states_grad")
        )
        assert gates is not None
        assert tokens is not None
        assert states is not None
        assert grad is not None
        initial, final_grad = given["initial_state"], given["final_state_grad"]
        out = reference.forward(gates, tokens, initial)
        grads = reference.backward(gates, states, grad, initial, final_grad)
        return {
            "forward": relative_error(out, wide["states"]),
            "backward": max(
                relative_error(found, wide[name])
                for found, name in zip(grads, OUTPUTS["backward"], strict=True)
            ),
        }


def draw(shape: Shape, dtype: str, device: torch.device | str, *, with_states: bool) -> Trial:
    """Fresh random inputs: gates in (0, 1), a good part of them close to 1; the rest normal.

    Drawn, and solved in float64, on the CPU: only the kernels under test run on ``device``.
    """
    batch, channels, _ = shape
    narrow = getattr(torch, dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size).to(narrow)

    gates = (1 - torch.rand(*shape) ** 3).to(narrow)
    tokens, states_grad = normal(*shape), normal(*shape)
    initial = normal(batch, channels) if with_states else None
    final_grad = normal(batch, channels) if with_states else None
    initial64 = None if initial is None else initial.double()
    final_grad64 = None if final_grad is None else final_grad.double()
    states = reference.forward(gates.double(), tokens.double(), initial64)
    gates_grad, tokens_grad, initial_grad = reference.backward(
        gates.double(), states, states_grad.double(), initial64, final_grad64
    )
    inputs = {
        "gates": gates,
        "tokens": tokens,
        "initial_state": initial,
        # The backward pass gets the states as the forward pass has rounded them.
        "states": states.to(narrow),
        "states_grad": states_grad,
        "final_state_grad": final_grad,
    }
    expected = {
        "states": states,
        "final_state": states[..., -1],
        "gates_grad": gates_grad,
        "tokens_grad": tokens_grad,
        "initial_state_grad": initial_grad,
    }
    return Trial(
        shape,
        dtype,
        inputs={name: None if t is None else t.to(device) for name, t in inputs.items()},
        expected={name: t.to(device) for name, t in expected.items()},
    )


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """One trial per shape; every second one has an initial and a final state."""
    for number, shape in enumerate(shapes):
        yield draw(shape, dtype, device, with_states=number % 2 == 1)


def _placed(tensor: Tensor, layout: Layout, aligned: bool) -> Tensor:
    """A copy with the layout's dimension contiguous, off the 16-byte grid unless ``aligned``."""
    order = (0, 1, 2) if layout == "time_last" else (0, 2, 1)
    moved = tensor.permute(order)
    room = torch.empty(moved.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    flat = room[:-1] if aligned else room[1:]
    return flat.view(moved.shape).copy_(moved).permute(order)
