"""The Triton kernels of linear_scan, run on the CPU by Triton's interpreter.

The interpreter replaces ``triton.jit`` for a whole process, so each kernel gets a process of its own:
it runs this file, which prints what is wrong with the kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Strides,
)
from scan_registry.kernels.linear_scan.spec import DIRECTIONS, DTYPES, FAMILY, LAYOUTS
from scan_registry.kernels.model import Kernel, Static, Variant

KERNELS: dict[str, tuple[Layout, Direction]] = {
    f"{layout}_{direction}": (layout, direction) for layout in LAYOUTS for direction in DIRECTIONS
}
#: Largest ‖out − ref‖ / ‖ref‖. The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}

Shape = tuple[int, int, int]
#: (batch, channels, time) for the tiles that are built: one step, times around the ends of tiles, odd
#: numbers of lines. Small ones, since the interpreter takes 60 ms for a tile of any size.
SHAPES: dict[Layout, tuple[Shape, ...]] = {
    "time_last": (
        (1, 1, 1),
        (3, 1, 2),
        (1, 3, 3),
        (1, 1, 127),
        (1, 1, 128),
        (1, 3, 129),
        (1, 1, 1025),
    ),
    "channel_last": (
        (1, 1, 1),
        (3, 5, 2),
        (1, 33, 3),
        (1, 3, 127),
        (1, 2, 128),
        (1, 1, 129),
    ),
}
#: Tiles that are not built, of several rows or of many steps, and what they run on.
OTHER_TILES: dict[Layout, tuple[dict[str, Static], tuple[Shape, ...]]] = {
    "time_last": ({"rows": 4, "times": 32, "warps": 1}, ((3, 5, 2), (1, 3, 65), (7, 1, 32))),
    "channel_last": ({"channels": 4, "times": 128, "warps": 1}, ((1, 3, 1025),)),
}
#: Memory orders of (batch, channels, time): as made, and as seen in a transposed view.
ORDERS: dict[Layout, tuple[tuple[int, ...], ...]] = {
    "time_last": ((0, 1, 2), (1, 0, 2)),
    "channel_last": ((0, 2, 1), (2, 0, 1)),
}
#: Passed as the contiguous dimension's stride, which kernels take to be 1 without looking.
UNUSED_STRIDE = 1 << 40


@dataclass(frozen=True)
class Placed:
    """A tensor, in memory of which everything else holds ``fill``."""

    tensor: Tensor
    memory: Tensor
    fill: float

    @classmethod
    def empty(
        cls, size: torch.Size, dtype: torch.dtype, order: tuple[int, ...], gap: int
    ) -> Placed:
        """NaNs, with dimensions in memory ``order`` and ``gap`` elements of 7 between lines."""
        sizes = [size[dimension] for dimension in order]
        margin, pitch = 16, sizes[-1] + gap
        lines = torch.Size(sizes[:-1]).numel()
        memory = torch.full((margin + lines * pitch + margin,), 7.0, dtype=dtype)
        room = memory[margin : margin + lines * pitch].view(*sizes[:-1], pitch)
        tensor = room[..., : sizes[-1]].permute([order.index(d) for d in range(len(order))])
        return cls(tensor.fill_(torch.nan), memory, 7.0)

    @classmethod
    def copy(cls, values: Tensor, order: tuple[int, ...], gap: int) -> Placed:
        """``values`` among NaNs, so that what is read beyond a line shows in the result."""
        placed = cls.empty(values.shape, values.dtype, order, gap)
        placed.memory.fill_(torch.nan)
        placed.tensor.copy_(values)
        return placed

    def is_intact(self) -> bool:
        """Whether every element was written, and nothing around them."""
        around = self.memory.clone()
        layout = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        around.as_strided(*layout).fill_(self.fill)
        return bool((around == self.fill).all()) and not bool(self.tensor.isnan().any())


def draw(shape: Shape, dtype: str, *, with_states: bool) -> dict[str, Tensor]:
    """Inputs of both directions; ``states`` are rounded, as the forward pass leaves them."""
    inputs = {
        "gates": 1 - torch.rand(shape) ** 3,
        "tokens": torch.randn(shape),
        "states_grad": torch.randn(shape),
    }
    if with_states:
        inputs["initial_state"] = torch.randn(shape[:2])
        inputs["final_state_grad"] = torch.randn(shape[:2])
    narrow = getattr(torch, dtype)
    inputs = {name: tensor.to(narrow) for name, tensor in inputs.items()}
    return inputs | {"states": expect("forward", inputs)["states"].to(narrow)}


def expect(direction: Direction, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float64 reference's outputs for the same inputs."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    gates, initial = wide["gates"], wide.get("initial_state")
    if direction == "forward":
        states = reference.forward(gates, wide["tokens"], initial)
        return {"states": states, "final_state": states[..., -1]}
    gates_grad, tokens_grad, initial_grad = reference.backward(
        gates, wide["states"], wide["states_grad"], initial, wide.get("final_state_grad")
    )
    return {
        "gates_grad": gates_grad,
        "tokens_grad": tokens_grad,
        "initial_state_grad": initial_grad,
    }


def launch(kernel: Kernel, variant: Variant, arguments: dict[str, Tensor]) -> None:
    """Run ``variant`` on tensors by parameter name; those that are missing are null."""
    from scan_registry.kernels.linear_scan import triton_kernels

    layout, direction = KERNELS[kernel.name]
    contiguous = 2 if layout == "time_last" else 1
    strides = []
    for name in STRIDED[direction]:
        stride = list(arguments["gates_grad" if name == "grads" else name].stride())
        stride[contiguous] = UNUSED_STRIDE
        strides.append(Strides(*stride))
    dtype = variant.text("dtype")
    batch, channels, time = arguments["gates"].shape
    problem = LinearScanProblem(
        direction, layout, dtype, batch, channels, time, tuple(strides), alignment=1
    )
    plan = kernel.launch(variant, problem)
    null = torch.empty(0, dtype=getattr(torch, dtype))
    assert null.data_ptr() == 0
    values = [
        arguments.get(parameter.name, null)
        if parameter.kind == "pointer"
        else plan.scalars[parameter.name]
        for parameter in kernel.parameters
    ]
    getattr(triton_kernels, kernel.entry)[plan.grid](*values, **kernel.constants(variant))


def runs(kernel: Kernel, layout: Layout) -> Iterator[tuple[Variant, Shape]]:
    """Everything to run; the interpreter knows no alignment, so generic stands for aligned."""
    for variant in kernel.variants:
        if variant.text("access") == "generic":
            yield from product((variant,), SHAPES[layout])
    tile, shapes = OTHER_TILES[layout]
    for dtype, shape in product(DTYPES, shapes):
        statics = {"dtype": dtype, "access": "generic", **tile}
        yield replace(kernel.variants[0], statics=tuple(statics.items())), shape


def faults(name: str) -> Iterator[str]:
    """What is wrong with the kernel ``name``."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel(name, "triton")
    layout, direction = KERNELS[name]
    # Two orders and five pairs of options: every order meets every pair.
    orders = cycle(ORDERS[layout])
    options = cycle([*product((True, False), repeat=2), (True, True)])
    for variant, shape in runs(kernel, layout):
        order, (with_states, with_last) = next(orders), next(options)
        inputs = draw(shape, variant.text("dtype"), with_states=with_states)
        expected = expect(direction, inputs)
        if not with_last:
            expected = {output: out for output, out in expected.items() if out.dim() == 3}

        # Each input has a pitch of its own, and the outputs, which share one, another. The optional
        # tensors, of two dimensions, are contiguous.
        narrow = inputs["gates"].dtype
        given = {
            tensor: Placed.copy(values, *((order, 3 + gap) if values.dim() == 3 else ((0, 1), 0)))
            for gap, (tensor, values) in enumerate(inputs.items())
            if tensor not in expected
        }
        outputs = {
            tensor: Placed.empty(
                out.shape, narrow, *((order, 2) if out.dim() == 3 else ((0, 1), 0))
            )
            for tensor, out in expected.items()
        }
        launch(kernel, variant, {t: placed.tensor for t, placed in (given | outputs).items()})

        where = f"{variant} {shape} order={order} states={with_states} last={with_last}"
        for output, placed in outputs.items():
            error = (placed.tensor.double() - expected[output]).norm()
            if not error <= TOLERANCE[variant.text("dtype")] * expected[output].norm():
                yield f"{where}: {output} is off by {error:.2g}"
            if not placed.is_intact():
                yield f"{where}: {output} was not written whole, or something beside it was"


@pytest.mark.parametrize("name", KERNELS)
def test_matches_the_reference(name: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, __file__, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""


def mend_interpreter() -> None:
    """Make Triton 3.6's interpreter fast enough, and fit for numpy 2.4.

    It calls the combining function of a scan or a reduction once per element, which takes 0.2 ms;
    here it is called on whole tiles, a logarithmic number of times. And it takes an array of one
    element for an integer, which numpy 2.4 no longer does.
    """
    from triton.runtime import interpreter

    def scan(self: Any, inputs: Any) -> list[Any]:
        values = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs]
        types = [each.dtype for each in inputs]
        distance = 1
        while distance < len(values[0]):
            # Tensors have to keep their size; what has come round the end is not used.
            earlier = [np.roll(value, distance, axis=0) for value in values]
            combined = self.combine_fn.fn(*map(self.to_tensor, earlier + values, types + types))
            combined = combined if isinstance(combined, tuple) else (combined,)
            values = [
                np.concatenate([value[:distance], tensor.handle.data[distance:]])
                for value, tensor in zip(values, combined, strict=True)
            ]
            distance *= 2
        return list(map(self.to_tensor, [np.moveaxis(v, 0, self.axis) for v in values], types))

    def reduce(self: Any, inputs: Any) -> list[Any]:
        last = [np.take(each.handle.data, [-1], self.axis) for each in scan(self, inputs)]
        kept = last if self.keep_dims else [value.squeeze(self.axis) for value in last]
        return [self.to_tensor(value, each.dtype) for value, each in zip(kept, inputs, strict=True)]

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.ScanOps.generic_scan = scan
    interpreter.ReduceOps.generic_reduce = reduce


if __name__ == "__main__":
    mend_interpreter()
    for fault in faults(sys.argv[1]):
        print(fault)
