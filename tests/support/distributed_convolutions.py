"""What each rank does in tests of convolutions whose time is cut between ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed_cases import raised
from torch import Tensor

import scan_registry
from scan_registry import distributed
from scan_registry.kernels.causal_conv1d.op import distributed as convolution

CHANNELS = 3
KINDS = ("plain", "seq_idx", "cu_seqlens")


class Case(NamedTuple):
    """One sequence, and how it is cut."""

    lengths: Sequence[int]
    kind: str
    width: int
    initial: bool
    final: bool
    silu: bool = True

    def arguments(self) -> tuple[list[Tensor], dict[str, Any]]:
        """What is differentiated, and the rest, of the whole sequence; alike on all ranks."""
        time, batch = sum(self.lengths), 1 if self.kind == "cu_seqlens" else 2
        made = torch.Generator().manual_seed(sum(self.lengths) + self.width)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=made).requires_grad_()

        rest: dict[str, Any] = {"activation": "silu" if self.silu else None}
        rest["return_final_state"] = self.final
        tensors = [randn(batch, CHANNELS, time), randn(CHANNELS, self.width), randn(CHANNELS)]
        sequences = batch
        if self.kind == "seq_idx":
            numbers = torch.randint(0, 3, (batch, time), generator=made).sort(-1).values
            if time > 3:
                numbers[0, 2] = -1  # padding
            rest["seq_idx"] = numbers
        if self.kind == "cu_seqlens":
            inner = sorted(random.Random(time).choices(range(time + 1), k=3))
            rest["cu_seqlens"] = torch.tensor([0, *inner, time])
            sequences = 4
        if self.initial:
            tensors.append(randn(sequences, CHANNELS, self.width - 1))
        return tensors, rest


def cases(ranks: int) -> Iterator[Case]:
    """Parts of all lengths below the width and above, and none; on three ranks with all that a call may have."""
    cuts = (
        [5] * 7,
        [1] * 7,
        [0, 7, 1, 2, 0, 1, 1],
        [4, 0, 0, 1, 0, 2, 0],
        [1, 0, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 3, 0],
        [0] * 7,
    )
    for number, cut in enumerate(cuts):
        lengths = cut[:ranks] if sum(cut[:ranks]) else cut[-ranks:]
        for other, kind in enumerate(KINDS):
            width = (2, 4, 8)[(number + other) % 3]
            states = (False, False), (True, True), (number % 2 == 0, width == 4)
            for initial, final in states if ranks == 3 else states[1 + (number + other) % 2 :][:1]:
                yield Case(lengths, kind, width, initial, final, silu=width != 2)


def parts(case: Case, rank: int) -> tuple[slice, list[Tensor], dict[str, Any]]:
    """This rank's steps, and its arguments."""
    tensors, rest = case.arguments()
    begin = sum(case.lengths[:rank])
    mine = slice(begin, begin + case.lengths[rank])
    local = [t.detach().clone() for t in tensors]
    local[0] = local[0][..., mine].clone()
    if "seq_idx" in rest:
        rest["seq_idx"] = rest["seq_idx"][:, mine]
    return mine, [t.requires_grad_() for t in local], rest


def _call(function: Any, tensors: list[Tensor], rest: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight, bias, *initial = tensors
    state = initial[0] if initial else None
    made = function(x, weight, bias, initial_state=state, **rest)
    return made if isinstance(made, tuple) else (made,)


def _close(found: Tensor, expected: Tensor, what: object) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def check_all(rank: int, ranks: int, group: Any) -> int:
    """Results and gradients are those of one process; the number of cases."""
    count = 0
    for case in cases(ranks):
        _check(case, rank, group)
        count += 1
    return count


def _check(case: Case, rank: int, group: Any) -> None:
    tensors, rest = case.arguments()
    whole = _call(scan_registry.causal_conv1d, tensors, rest)
    weights = [
        torch.linspace(-1, 1, max(1, out.numel()), dtype=out.dtype)[: out.numel()].view_as(out)
        for out in whole
    ]
    expected = torch.autograd.grad(whole, tensors, weights)
    mine, local, rest = parts(case, rank)
    with patch.object(convolution, "convolve", wraps=convolution.convolve) as convolve:
        made = _call(distributed.causal_conv1d, local, {**rest, "group": group})
    for (
        call
    ) in convolve.mock_calls:  # kernels take states without gaps, where plain torch takes any
        assert call.args[0].initial_state.is_contiguous()
    _close(made[0], whole[0][..., mine], (case, rank, "y"))
    weights[0] = weights[0][..., mine]
    if case.final:
        _close(made[1], whole[1], (case, rank, "final state"))
        weights[1] = weights[1] * (rank == 0)  # the loss is the sum of all ranks'
    found = torch.autograd.grad(made, local, weights)
    _close(found[0], expected[0][..., mine], (case, rank, "gradient of x"))
    for number, (grad, wanted) in enumerate(zip(found[1:], expected[1:], strict=True)):
        total = grad.clone()
        dist.all_reduce(total, group=group)
        _close(total, wanted, (case, rank, f"gradient {number + 1}"))


def check_second_derivative(rank: int, ranks: int, group: Any) -> None:
    """Derivatives of gradients are those of one process, also where a halo is of several ranks."""
    case = Case([1] * (ranks - 1) + [5], "plain", 4, initial=True, final=True)
    time = sum(case.lengths)

    def twice(tensors: list[Tensor], function: Any, rest: Any, steps: slice, first: bool) -> Any:
        y, last = _call(function, tensors, rest)
        factor = torch.arange(6 * time, dtype=torch.float64).view(2, 3, time)[..., steps].cos()
        loss = (y.square() * factor).sum() + (last**3).sum() * first
        x_grad, weight_grad, *others = torch.autograd.grad(loss, tensors, create_graph=True)
        again = (x_grad.square() * factor).sum() + (1.5 * weight_grad).sum()
        return torch.autograd.grad(again + sum(each.sum() for each in others), tensors)

    tensors, rest = case.arguments()
    expected = twice(tensors, scan_registry.causal_conv1d, rest, slice(None), True)
    mine, local, rest = parts(case, rank)
    found = twice(local, distributed.causal_conv1d, {**rest, "group": group}, mine, rank == 0)
    _close(found[0], expected[0][..., mine], rank)
    for grad, wanted in zip(found[1:], expected[1:], strict=True):
        total = grad.clone()
        dist.all_reduce(total, group=group)
        _close(total, wanted, rank)


def check_narrow(rank: int, ranks: int, group: Any) -> None:
    """bfloat16 inputs with float32 weights, in the layout where channels have stride 1."""
    case = Case([2, 0, 9][:ranks], "seq_idx", 4, initial=False, final=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        (x, weight, bias), rest = case.arguments()
        narrow = x.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        filters = weight.detach().float(), bias.detach().float()
        whole = scan_registry.causal_conv1d(narrow, *filters, **rest)
        mine, _, rest = parts(case, rank)
        made = distributed.causal_conv1d(narrow[..., mine], *filters, **rest, group=group)
        torch.testing.assert_close(made[0], whole[0][..., mine])
        torch.testing.assert_close(made[1], whole[1])
        assert made[0].dtype == dtype


def refused(rank: int, ranks: int, group: Any, what: str) -> str:
    """What a rank says of a call that is bad on the last rank; afterwards a good one has to work."""
    x, weight = torch.randn(2, CHANNELS, 4), torch.randn(CHANNELS, 4)
    last = rank == ranks - 1
    bad: dict[str, Any] = {
        "rank of x": {"x": x[0]},
        "dtype of x": {"x": x.to(torch.int32)},
        "channels of x": {"x": x[:, 1:], "weight": weight[1:]},
        "width": {"weight": weight[:, 1:]},
        "activation": {"activation": "silu"},
        "final state": {"return_final_state": True},
        "unknown activation": {"activation": "relu"},
        "gradient": {"x": x.clone().requires_grad_()},
        "bounds": {"x": x[:1], "cu_seqlens": torch.tensor([0, 1, 4 * ranks])},
    }[what]
    good = {"x": x, "weight": weight, "group": group}
    if what == "bounds":
        good |= {"x": x[:1], "cu_seqlens": torch.tensor([0, 2, 4 * ranks])}
    said = raised(lambda: distributed.causal_conv1d(**(good | bad if last else good)))
    made = distributed.causal_conv1d(**good)
    assert isinstance(made, Tensor)
    return said


def check_checkpointed(rank: int, ranks: int, group: Any) -> None:
    """Under activation checkpointing, and in what torch.compile compiles, gradients are the same."""
    from torch.utils.checkpoint import checkpoint

    case = Case([3, 4, 2][:ranks], "plain", 4, initial=False, final=False)
    _, (x, weight, bias), _ = parts(case, rank)

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        inner = distributed.causal_conv1d(x.tanh(), weight, bias, activation="silu", group=group)
        made: Tensor = distributed.causal_conv1d(inner * 2, weight, bias, group=group)
        return made.sin()

    expected = torch.autograd.grad(block(x, weight, bias).sum(), (x, weight, bias))
    for how in (
        lambda *args: checkpoint(block, *args, use_reentrant=False),
        torch.compile(block, backend="aot_eager"),
    ):
        found = torch.autograd.grad(how(x, weight, bias).sum(), (x, weight, bias))
        for one, other in zip(found, expected, strict=True):
            _close(one, other, rank)
