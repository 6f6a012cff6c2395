"""``causal_conv1d`` on its own CUDA kernels, emulated on the CPU: what the operator passes is what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planning import forget_plans
from posing import best
from torch import Tensor

from scan_registry import causal_conv1d, causal_conv1d_update
from scan_registry.kernels.causal_conv1d.op import plans
from scan_registry.kernels.causal_conv1d.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.ops.launching import PlanCache, Run

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture
def play(
    monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, tmp_path: Path
) -> Callable[[], list[str]]:
    """Has CPU tensors taken for a GPU's, and problems given to the emulator; lists the variants that ran."""

    def start() -> list[str]:
        used: list[str] = []

        def runner(
            call: plans.KernelCall, device: torch.device, options: Any
        ) -> tuple[Run, Variant]:
            problem = call.problem
            kernel = FAMILY.kernel(problem.kernel, "cuda")
            variant = best(kernel, problem)
            library = cuda_emulator.emulated(kernel, variant, tmp_path)

            def run(tensors: Mapping[str, Tensor | None]) -> None:
                assert set(tensors) <= set(kernel.pointers)
                used.append(str(variant))
                library.run(problem, tensors, 0)

            return run, variant

        monkeypatch.setattr(plans, "_is_plain", lambda x, options: x.numel() == 0)
        monkeypatch.setattr(plans, "_runner", runner)
        monkeypatch.setattr(plans, "plan_cache", PlanCache())
        forget_plans(monkeypatch, "causal_conv1d")
        return used

    return start


def laid(tensor: Tensor, how: str) -> Tensor:
    """The values in memory of another layout."""
    batch, channels, time = tensor.shape
    if how == "columns":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "gaps":
        return tensor.new_full((batch, channels, time + 5), torch.nan)[..., 2 : time + 2].copy_(
            tensor
        )
    if how == "slice of columns":
        room = tensor.new_full((batch, time, channels + 3), torch.nan)
        return room[..., 3:].copy_(tensor.transpose(1, 2)).transpose(1, 2)
    if how == "batch last":
        return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if how == "backwards":
        return tensor.transpose(0, 2).contiguous().transpose(0, 2)
    return tensor.contiguous()


WAYS = ("rows", "columns", "gaps", "slice of columns", "batch last", "backwards")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"initial_state": True, "return_final_state": True, "activation": "silu"},
    "packed": {"cu_seqlens": True, "initial_state": True, "return_final_state": True},
    "indexed": {"seq_idx": True, "activation": "silu"},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_plain_torch(play: Callable[[], list[str]], name: str, dtype: torch.dtype) -> None:
    """Results and gradients, of tensors that lie in any way, and of gradients that lie in others."""
    torch.manual_seed(0)
    options = OPTIONS[name]
    batch, channels, time, width = 1 if "cu_seqlens" in options else 2, 16, 24, 4
    bounds = torch.tensor([0, 0, 2, 11, 24])
    x = torch.randn(batch, channels, time).to(dtype)
    filters = torch.randn(channels, width) / 2, torch.randn(channels)
    rows = len(bounds) - 1 if "cu_seqlens" in options else batch
    state = torch.randn(rows, channels, width - 1).to(dtype)
    seq_idx = (torch.rand(batch, time) < 0.2).cumsum(1)
    drawn = {"cu_seqlens": bounds, "seq_idx": seq_idx, "initial_state": state}
    given = {n: drawn[n].clone() if n in drawn else value for n, value in options.items()}
    weights = torch.randn(batch, channels, time).to(dtype)

    def results(way: str, of_grad: str, wide: bool) -> list[Tensor]:
        def copied(tensor: Tensor) -> Tensor:
            return tensor.double() if wide and tensor.is_floating_point() else tensor

        leaf = laid(copied(x), way).requires_grad_()
        others = [copied(t).requires_grad_() for t in filters]
        call = {n: copied(t) if isinstance(t, Tensor) else t for n, t in given.items()}
        leaves = [leaf, *others]
        if "initial_state" in call:
            leaves.append(call["initial_state"].requires_grad_())
        found = causal_conv1d(leaf, *others, **call)
        outputs = found if isinstance(found, tuple) else (found,)
        grads = [laid(copied(weights), of_grad), *(torch.ones_like(t) for t in outputs[1:])]
        assert outputs[0].stride() == torch.empty_like(leaf).stride()
        found = [*outputs, *torch.autograd.grad(outputs, leaves, grads)]
        for tensor in leaves:
            tensor.requires_grad_(False)
        return [t.detach() for t in found]

    expected = results("rows", "rows", True)
    used = play()
    for turn, way in enumerate(WAYS):
        grad = WAYS[(turn + turn % 2) % len(WAYS)]  # lies like every other, or like the next
        used.clear()
        for got, want in zip(results(way, grad, False), expected, strict=True):
            assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm(), (way, grad)
        assert len(used) == 3  # forward, backward and the sum


def test_only_what_is_wanted_is_computed(play: Callable[[], list[str]]) -> None:
    used = play()
    x, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(8, 4)
    causal_conv1d(x, weight).sum().backward()
    assert [name.split(":")[0] for name in used] == [
        "causal_conv1d.time_last_forward",
        "causal_conv1d.time_last_backward",
    ]


def test_one_step_after_the_other(play: Callable[[], list[str]]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 16), torch.randn(8, 4), torch.randn(8)
    expected = causal_conv1d(x, weight, bias, activation="silu")
    used, state = play(), torch.zeros(2, 8, 3)
    found = [causal_conv1d_update(each, state, weight, bias, "silu") for each in x.unbind(-1)]
    torch.testing.assert_close(torch.stack(found, -1), expected)
    assert len(used) == 16
