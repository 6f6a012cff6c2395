"""A stand-in for the kernels of gated_scan on the CPU: it reads and writes memory as a problem says, and nothing else. And
calls to try it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from planning import forget_plans
from torch import Tensor

from scan_registry import gated_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.cases import solved
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import plans
from scan_registry.kernels.gated_scan.problem import POINTERS, GatedScanProblem
from scan_registry.ops.launching import PlanCache, Run

_ENTERING = {"final_state": "initial_state", "initial_state_grad": "final_state_grad"}


def run(problem: GatedScanProblem, tensors: Mapping[str, Tensor | None]) -> None:
    """What the kernel of the problem does, computed in float64."""
    direction = "forward" if problem.direction == "forward" else "backward"
    assert set(tensors) <= set(POINTERS[direction])
    shape = problem.batch, problem.channels, problem.time
    states = (*shape[:2], problem.sequences) if problem.sequences else shape[:2]
    strides = {name: f"{name}s" for name in ("input", "grad")}

    def view(name: str) -> Tensor | None:
        tensor = tensors.get(name)
        if tensor is None:
            return None
        if name in ("offsets", "parameters", "parameters_grad"):
            assert tensor.is_contiguous()
            per_channel = problem.parameters, problem.channels
            return tensor.view(per_channel) if name == "parameters" else tensor
        if name == "reset":
            return _strided(tensor, (shape[0], shape[2]), (problem.reset_batch, 1))
        if name in ("initial_state", "final_state", "final_state_grad", "initial_state_grad"):
            of, size = problem.strides_of("state"), states
        else:
            kind = "grad" if name.startswith("input") and name.endswith("_grad") else "input"
            group = strides[kind] if name.startswith("input") else name
            of, size = problem.strides_of(group), shape
        return _strided(tensor, size, (of.batch, of.channel, of.time)[: len(size)])

    given = {name: view(name) for name in POINTERS[direction] if name != "workspace"}
    assert (given["reset"] is not None) == problem.resets
    names = {**dict.fromkeys(("states_grad", "final_state_grad", "initial_state")), **given}
    if names["states_grad"] is None:
        names["states_grad"] = torch.zeros(shape)
    kind = next(k for k in KINDS.values() if (k.source, k.option) == (problem.kind, problem.option))
    # Operators are run below autograd, which it takes here.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        found, _ = solved(kind, names, problem.reverse)
    if problem.direction == "backward":  # the states that it gets are those that forward made
        kept = given["states"]
        assert kept is not None
        error = (kept.double() - found["states"]).norm() / found["states"].norm().clamp_min(1e-9)
        assert error < 1e-2
    grads = {n for n in given if n.endswith("_grad")} - {"states_grad", "final_state_grad"}
    for name in grads if direction == "backward" else set(_FORWARD):
        out = given.get(name)
        if out is not None:
            _write(name, out, found[name], problem, given["offsets"])


_FORWARD = ("states", "final_state")


def _write(
    name: str, out: Tensor, value: Tensor, problem: GatedScanProblem, offsets: Tensor | None
) -> None:
    if name == "parameters_grad":
        assert out.shape[0] == problem.parts
        out.copy_(value.expand(out.shape) / problem.parts)
    elif name in _ENTERING and problem.sequences:
        assert offsets is not None
        some = offsets.diff() > 0  # kernels write none of the others
        out[..., some] = value[..., some].to(out.dtype)
    else:
        out.copy_(value)


def _strided(tensor: Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return tensor.as_strided(size, strides, tensor.storage_offset())


def played(monkeypatch: pytest.MonkeyPatch, quickly: bool) -> list[GatedScanProblem]:
    """Has CPU tensors taken for a GPU's, and problems given to the stand-in; lists those that it got. By the fast path, or
    by the other."""
    found: list[GatedScanProblem] = []

    def prepared(problem: GatedScanProblem, device: torch.device, backend: Any) -> tuple[Run, int]:
        def launch(tensors: Mapping[str, Tensor | None]) -> None:
            found.append(problem)
            run(problem, tensors)

        return launch, problem.parts

    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "_prepared", prepared)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "gated_scan", quickly)
    return found


# --- Calls ------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BOUNDS = torch.tensor([0, 0, 9, 30, 30, 40])
SHAPE = 2, 8, 40


def laid(tensor: Tensor, how: str) -> Tensor:
    """The values in memory of another layout."""
    batch, channels, time = tensor.shape
    if how == "channels":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "gaps":
        room = tensor.new_full((batch, channels, 2 * time), torch.nan)
        return room[..., 3 : time + 3].copy_(tensor)
    if how == "channels with gaps":
        room = tensor.new_full((batch, time, 3 * channels), torch.nan)
        return room[..., channels : 2 * channels].copy_(tensor.transpose(1, 2)).transpose(1, 2)
    if how == "batch last":
        return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return tensor.contiguous()


WAYS = ("rows", "channels", "gaps", "channels with gaps", "batch last")


def drawn(kind: str, dtype: torch.dtype, shape: Any = SHAPE, packed: bool = False) -> list[Tensor]:
    """Inputs, parameters and the initial state."""
    torch.manual_seed(0)
    of, (batch, channels, _) = KINDS[kind], shape
    inputs = [torch.randn(shape).to(dtype) for _ in of.inputs]
    if kind == "linear":
        inputs[0] = inputs[0].sigmoid()
    parameters = [torch.rand(channels) * 0.9 for _ in of.parameters]
    sequences = (len(BOUNDS) - 1,) if packed else ()
    return [*inputs, *parameters, torch.randn(batch, channels, *sequences)]


def results(
    kind: str, tensors: list[Tensor], ways: Callable[[int], str], wide: bool, **how: Any
) -> list[Tensor]:
    """Outputs and gradients, of sequences that lie in some way each."""
    leaves = [
        laid(t.double() if wide else t, ways(n)) if t.shape == SHAPE else t.clone()
        for n, t in enumerate(tensors)
    ]
    leaves = [(t.double() if wide else t).detach().requires_grad_() for t in leaves]
    *inputs, initial = leaves
    made = gated_scan(kind, *inputs, initial_state=initial, return_final_state=True, **how)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x.dtype) for x in made]
    grads[0] = laid(grads[0], ways(9))
    assert made[0].stride() == torch.empty_like(inputs[0]).stride()
    return [x.detach() for x in (*made, *torch.autograd.grad(made, leaves, grads))]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "resets": {"reset": torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.2},
    "packed": {"cu_seqlens": BOUNDS},
}
OPTIONS["all"] = {**OPTIONS["reverse"], **OPTIONS["resets"], **OPTIONS["packed"]}


def close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(expected)
    for place, (out, wanted) in enumerate(zip(found, expected, strict=True)):
        assert out.shape == wanted.shape
        assert relative_error(out, wanted) <= TOLERANCE[dtype], place
