"""A stand-in for the kernels of gated_scan on the CPU: it reads and writes memory as a problem says, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.cases import solved
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import POINTERS, GatedScanProblem

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
        if tensor is None or name in ("offsets", "parameters", "parameters_grad"):
            assert tensor is None or tensor.is_contiguous()
            per_channel = problem.parameters, problem.channels
            return (
                tensor.view(per_channel) if tensor is not None and name == "parameters" else tensor
            )
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
        found = solved(kind, names, problem.reverse)
    if problem.direction == "backward":  # the states that it gets are those that forward made
        kept = given["states"]
        assert kept is not None
        error = (kept.double() - found["states"]).norm() / found["states"].norm().clamp_min(1e-9)
        assert error < 1e-2
    written = {n for n in given if n.endswith("_grad") and n not in ("states_grad",)}
    for name in written - {"final_state_grad"} if direction == "backward" else set(_FORWARD):
        out = given.get(name)
        if out is None:
            continue
        if name == "parameters_grad":
            assert out.shape[0] == problem.parts
            out.copy_(found[name].expand(out.shape) / problem.parts)
        elif name in _ENTERING and problem.sequences:
            offsets = given["offsets"]
            assert offsets is not None
            some = offsets.diff() > 0  # kernels write none of the others
            out[..., some] = found[name][..., some].to(out.dtype)
        else:
            out.copy_(found[name])


_FORWARD = ("states", "final_state")


def _strided(tensor: Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return tensor.as_strided(size, strides, tensor.storage_offset())
