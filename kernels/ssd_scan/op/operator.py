"""``ssd_scan`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scan_registry.ops.operator import KernelCall, Operator, Option, ParsedCall, described_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from scan_registry.hardware.device import Device
    from scan_registry.kernels.ssd_scan.op.arguments import Arguments, Options
    from scan_registry.kernels.ssd_scan.problem import SSDScanProblem

_USUAL_STATES = 128


class SSDScan(Operator):
    """Its kernels are not tuned."""

    name = "ssd_scan"
    shape = "batch, time, heads and size of a head"
    options = (
        Option("--states", type=int, metavar="N", help=f"of a head; default: {_USUAL_STATES}"),
        Option("--groups", type=int, metavar="N", help="that B and C come in; default: 1"),
    )

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        if len(shape) != 4:
            raise ValueError(
                f"--shape is {args.shape!r}; ssd_scan takes batch, time, heads and size of a head, such as 8,2048,80,64"
            )
        batch, time, heads, _ = shape
        states = _USUAL_STATES if args.states is None else args.states
        if states < 1:
            raise ValueError(f"--states is {states}; accepted are positive integers")
        groups = 1 if args.groups is None else args.groups
        if groups < 1 or heads % groups:
            raise ValueError(f"--groups is {groups}; accepted are divisors of {heads} heads")
        wide = "float64" if dtype == "float64" else "float32"

        def of_heads() -> Tensor:
            return described_tensor((heads,), wide)

        projections = [described_tensor((batch, time, groups, states), dtype) for _ in "BC"]
        tensors = (
            *(described_tensor(shape, dtype), described_tensor((batch, time, heads), dtype)),
            *(of_heads(), *projections, of_heads(), None, of_heads()),
        )
        return ParsedCall(tensors, {"dt_softplus": True}, {"states": states, "groups": groups})

    def on_gpu(self, call: KernelCall, gpu: Device) -> KernelCall:
        from scan_registry.kernels.ssd_scan.op import calls, problems

        if isinstance(call, problems.KernelCall) and call.problem.direction == "backward":
            return problems.KernelCall(calls.cut(call.problem, gpu), call.copied)
        return call

    def run_on_cpu(self, problem: SSDScanProblem, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.ssd_scan.op import plans
        from scan_registry.kernels.ssd_scan.op.arguments import Arguments, Options

        options = Options(problem.softplus, problem.low, problem.high)
        arguments = Arguments._make([tensors.get(name) for name in Arguments._fields])
        final_grad = tensors.get("final_grad")
        if arguments.cu_seqlens is None:  # states have no dimension of sequences
            initial = arguments.initial_state
            arguments = arguments._replace(initial_state=None if initial is None else initial[:, 0])
            final_grad = None if final_grad is None else final_grad[:, 0]
        if problem.direction == "forward":
            out, final, _ = plans.forward(arguments, options._replace(final=True), False)
            if final is not None and arguments.cu_seqlens is None:
                final = final[:, None]
            results = {"out": out} | ({} if final is None else {"final_state": final})
            if tensors.get("ungated") is not None:
                results["ungated"] = plans.forward(arguments._replace(z=None), options, False)[0]
        else:
            results = _gradients(arguments, tensors["out_grad"], final_grad, options)
        for name, result in results.items():
            kept = tensors[name]
            assert kept is not None
            kept.zero_()
            # All of a sum in its first term.
            first = (
                kept[:, :1, :1]
                if name == "head_grads"
                else kept[(0,) * (kept.dim() - result.dim())]
            )
            first.copy_(result)


def _gradients(arguments: Arguments, out_grad: Any, final_grad: Any, options: Options) -> Any:
    """By the names of the backward kernel's results."""
    import torch

    from scan_registry.kernels.ssd_scan.op import plans
    from scan_registry.kernels.ssd_scan.op.arguments import DIFFERENTIABLE

    zeros = torch.zeros_like(arguments.A)
    D, bias = arguments.D, arguments.dt_bias
    arguments = arguments._replace(
        z=None,  # the gradient is of what it gates
        D=zeros if D is None else D,
        dt_bias=zeros if bias is None else bias,
    )
    names = arguments._fields[:DIFFERENTIABLE]
    wanted = tuple(name not in ("z", "initial_state") for name in names)
    gradients = plans.backward(arguments, None, out_grad, final_grad, options, wanted)
    grads: dict[str, Any] = dict(zip(names, gradients, strict=False))
    of_D = grads["D"] if grads["D"].dim() == 1 else grads["D"].sum(1)
    results = {f"{name}_grad": grads[name] for name in ("x", "dt", "B", "C")}
    results["head_grads"] = torch.stack([grads["A"], of_D, grads["dt_bias"]])[:, None, None]
    return results


OPERATOR = SSDScan()
