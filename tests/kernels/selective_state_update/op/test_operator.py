"""What ``selective_state_update`` makes of its arguments, on its own CUDA kernel, emulated on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from posing import best, taken
from torch import Tensor

from scan_registry.kernels.selective_state_update import reference
from scan_registry.kernels.selective_state_update.op import bench, plans
from scan_registry.kernels.selective_state_update.op.arguments import Arguments, check
from scan_registry.kernels.selective_state_update.spec import FAMILY
from scan_registry.ops.launching import addresses_of

#: What servers add.
SERVED = dict.fromkeys(("dst_state", "dst_indices", "seed", "cu_seqlens", "num_accepted"))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def mamba(dtype: torch.dtype = torch.float32, slots: int = 3, channels: int = 24) -> dict[str, Any]:
    """As in a block of Mamba: B and C are slices of one projection, x and z of another."""
    batch, states, rank = 3, 16, 8
    xz = torch.randn(batch, 2 * channels).to(dtype)
    projected = torch.randn(batch, rank + 2 * states).to(dtype)
    _, B, C = projected.split([rank, states, states], -1)
    return {
        "state": torch.randn(slots, channels, states),
        "x": xz[:, :channels],
        "dt": torch.rand(batch, channels).to(dtype),
        "A": -torch.rand(channels, states),
        "B": B,
        "C": C,
        "D": torch.randn(channels),
        "z": xz[:, channels:],
        "dt_bias": torch.rand(channels),
        "indices": None,
        **SERVED,
    }


def mamba_2(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """As there: A, dt, D and the bias are expanded."""
    batch, heads, channels, states = 2, 4, 6, 32
    return {
        "state": torch.randn(batch, heads, channels, states),
        "x": torch.randn(batch, heads, channels).to(dtype),
        "dt": torch.rand(batch, heads, 1).to(dtype).expand(-1, -1, channels),
        "A": (-torch.rand(heads, 1, 1)).expand(-1, channels, states),
        "B": torch.randn(batch, 2, states).to(dtype),
        "C": torch.randn(batch, 2, states).to(dtype),
        "D": torch.randn(heads, 1).to(dtype).expand(-1, channels),
        "z": None,
        "dt_bias": torch.rand(heads, 1).expand(-1, channels),
        "indices": None,
        **SERVED,
    }


def altered(given: dict[str, Any], **others: Callable[[Tensor], Any]) -> dict[str, Any]:
    return given | {name: how(given[name]) for name, how in others.items()}


def dense(slots: int = 3) -> dict[str, Any]:
    """As many channels as warps have rows."""
    return mamba(torch.bfloat16, slots, 128)


def in_heads(given: dict[str, Any], heads: int) -> dict[str, Any]:
    """The same channels as those of heads."""
    cut = dict.fromkeys(("state", "x", "dt", "z"), 1) | dict.fromkeys(("A", "D", "dt_bias"), 0)
    return given | {name: given[name].unflatten(at, (heads, -1)) for name, at in cut.items()}


def spread(tensor: Tensor) -> Tensor:
    """The same with gaps between its elements."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def padded(tensor: Tensor) -> Tensor:
    """The same with a gap behind each row."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def off(tensor: Tensor) -> Tensor:
    """The same one element off a boundary of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


#: Arguments, and the kernel that takes them.
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "mamba": (mamba, "aligned"),
    "mamba in bfloat16": (lambda: mamba(torch.bfloat16), "aligned"),
    "mamba-2": (mamba_2, "tied"),
    "a state in bfloat16": (
        lambda: altered(mamba(torch.bfloat16), state=Tensor.bfloat16),
        "aligned",
    ),
    "indices": (
        lambda: mamba(slots=5) | {"indices": torch.tensor([4, 9, -1, 9, 2])[::2]},
        "aligned",
    ),
    "a step of a sequence": (
        lambda: altered(mamba(), x=lambda x: torch.stack([x] * 3, -1)[..., 1], z=spread),
        "aligned",
    ),
    "dense rows": (dense, "dense"),
    "dense rows of bfloat16": (lambda: altered(dense(), state=Tensor.bfloat16), "dense"),
    "dense rows and indices": (
        lambda: dense(5) | {"indices": torch.tensor([4, 9, -1, 9, 2])[::2]},
        "dense",
    ),
    "dense rows, some of a larger pool": (
        lambda: altered(dense(), state=lambda t: torch.stack([t] * 3, 1)[:, 1]),
        "dense",
    ),
    "dense rows without z and D": (lambda: dense() | {"z": None, "D": None}, "dense"),
    "dense rows, D and a bias in bfloat16": (
        lambda: altered(dense(), D=Tensor.bfloat16, dt_bias=lambda t: spread(t.bfloat16())),
        "dense",
    ),
    "dense rows of heads": (lambda: in_heads(dense(), 8), "dense"),
    "a head for each dense row": (lambda: in_heads(dense(), 128), "dense"),
    "a pool of no slots": (
        lambda: altered(dense(), state=lambda t: t[:0]) | {"indices": torch.full((3,), -1)},
        "aligned",
    ),
    "rows of one group each": (
        lambda: altered(
            dense(), B=lambda t: torch.stack([t] * 2, 1), C=lambda t: torch.stack([t] * 2, 1)
        ),
        "aligned",
    ),
    "rows with gaps": (lambda: altered(dense(), state=padded), "aligned"),
    "x off a boundary": (lambda: altered(dense(), x=off), "aligned"),
    "dt with gaps": (lambda: altered(dense(), dt=spread), "aligned"),
    "no unit stride": (lambda: altered(mamba(), state=turned), "generic"),
    "B off a boundary": (lambda: altered(mamba(), B=off), "generic"),
    "A in bfloat16": (lambda: altered(mamba(), A=Tensor.bfloat16), "generic"),
    "A of each channel": (lambda: altered(mamba_2(), A=torch.clone), "aligned"),
    "x in another dtype": (lambda: altered(mamba(torch.bfloat16), x=Tensor.float), "generic"),
    "B and C of two dtypes": (lambda: altered(mamba(torch.bfloat16), B=Tensor.float), "generic"),
    "an odd number of states": (
        lambda: altered(mamba(), **dict.fromkeys(("state", "A", "B", "C"), lambda t: t[..., :13])),
        "generic",
    ),
}


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(("make", "access"), CALLS.values(), ids=CALLS)
def test_matches_plain_torch(
    make: Callable[[], dict[str, Any]],
    access: str,
    softplus: bool,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    given = Arguments(**make())
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in given]
    expected = reference.step(*wide[:9], dt_softplus=softplus, indices=given.indices)
    chunked, pieces = (given.state, given.A, given.B, given.C), (given.x, given.dt, given.z)
    call = plans.make_kernel_call(
        *(check(tuple(given), softplus, -1, "auto"), softplus, -1),
        *(addresses_of(chunked), addresses_of(pieces)),
    )
    kernel = FAMILY.kernel(call.problem.kernel, "cuda")
    variant = best(kernel, call.problem)
    assert variant.text("access") == access
    out = torch.empty_like(given.x)
    tensors = dict(zip(kernel.pointers, (*given, out), strict=True))
    cuda_emulator.emulated(kernel, variant, tmp_path).run(call.problem, tensors, 0)
    for found, exact in ((out, expected), (given.state, wide[0])):
        assert (found.double() - exact).norm() <= TOLERANCE[found.dtype] * exact.norm()


def test_tensors_that_offsets_of_32_bits_do_not_reach_are_not_aligned() -> None:
    given = Arguments(**mamba())
    far = torch.empty_strided((3, 24), (2**30, 1), device="meta")
    call = plans.make_kernel_call(given._replace(x=far), False, -1, 0)
    assert call.problem.large
    assert not plans.make_kernel_call(given, False, -1, 0).problem.large
    kernel = FAMILY.kernel(call.problem.kernel, "cuda")
    assert {variant.text("access") for variant in taken(kernel, call.problem)} == {"generic"}


@pytest.mark.parametrize(
    "text",
    ["channels:3,24,16:float32", "heads:2,4,6,32:bfloat16", "heads:2,4,6,32:float32:tokens=4"],
)
def test_the_benchmark_counts_the_bytes_of_all_tensors(text: str) -> None:
    """What is expanded counts once, and the state twice."""
    case = bench.Case.parse(text)
    state, x, *others = case.tensors("cpu")

    def bytes_of(tensor: Tensor) -> int:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        return math.prod(n for n, stride in sizes if stride) * tensor.element_size()

    moved = [state, state, x, x, *others]  # the output is like x
    assert case.traffic("step") == sum(map(bytes_of, moved))
