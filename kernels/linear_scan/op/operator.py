"""``linear_scan`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from scan_registry.ops.operator import (
    DTYPES,
    KernelCall,
    Operator,
    Option,
    ParsedCall,
    described_tensor,
    known,
    parse_shape,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scan_registry.kernels.linear_scan.op.bench import Case
    from scan_registry.kernels.linear_scan.problem import LinearScanProblem

_MOST_SEQUENCES = 2**31 - 1
#: Of each pass the states that enter it, and the one that it leaves.
_STATES = {
    "forward": (("initial_state",), "final_state"),
    "backward": (("initial_state", "final_state_grad"), "initial_state_grad"),
}


class LinearScan(Operator):
    """Its tuned shapes: rows of every length, channels many and few, and what has kernels of its own: odd sizes,
    packed sequences, gates for each channel. Of the wide dtypes, one problem of each layout."""

    name = "linear_scan"
    order = 0
    shape = "of each tensor, such as 8,1536,4096"
    options = (
        Option("--dim", type=int, help="the time dimension; default: the last"),
        Option("--gates-dtype", metavar="X", help="where it differs"),
        Option("--gates-shape", metavar="N,N,…", help="where they are broadcast"),
        Option("--reverse", action="store_true", help="scan from the end"),
        Option("--reset", action="store_true", help="states start anew at some steps"),
        Option(
            "--sequences",
            type=int,
            metavar="N",
            help="how many are packed along the time dimension",
        ),
    )
    instead = MappingProxyType(
        {
            "channel_last": "--dim names the time dimension of --shape: for tensors of (batch, time, channels) say --dim 1"
        }
    )
    tuned_shapes = (
        *(f"time_last:8,1536,{time}" for time in (2048, 8192, 512, 65536, 128)),
        *(f"channel_last:8,1024,{time}" for time in (8192, 1024, 32768)),
        "channel_last:8,1536,8192",
        "channel_last:16,512,4096",
        "channel_last:4,2048,4096",
        "channel_last:1,2048,8192",
        "channel_last:2,1024,4096",
        "time_last:1,1,16777216",
        "time_last:1,64,1048576",
        "channel_last:1,16,1048576",
        "channel_last:1,64,131072",
        "time_last:4096,512,64",
        "time_last:65536,64,16",
        "time_last:3,1537,4099",
        "time_last:1,1,16777213",
        "channel_last:8,1001,4099",
        "channel_last:1,1024,1048576:sequences=64",
        "channel_last:8,1024,8192:gates=channel",
    )
    tuned_dtypes = ("bfloat16", "float32", "float16")
    tuned_cases = (
        "time_last:8,512,8192:float64",
        "time_last:8,512,8192:complex64",
        "channel_last:8,512,8192:float64",
        "channel_last:8,512,8192:complex64",
    )

    def family_of(self, call: KernelCall) -> str:
        """States that start anew are scanned by ``gated_scan``."""
        from scan_registry.kernels.gated_scan.op import calls as gated_scan_calls

        return "gated_scan" if isinstance(call, gated_scan_calls.KernelCall) else self.name

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        gates_dtype, gates_shape, cu_seqlens = dtype, shape, None
        if args.gates_dtype is not None:
            gates_dtype = DTYPES[known("--gates-dtype", args.gates_dtype, [*DTYPES])]
        if args.gates_shape is not None:
            gates_shape = parse_shape("--gates-shape", args.gates_shape)
        if args.sequences is not None:
            if not 1 <= args.sequences <= _MOST_SEQUENCES:
                raise ValueError(
                    f"--sequences is {args.sequences}; accepted are numbers from 1 to {_MOST_SEQUENCES}"
                )
            import torch

            cu_seqlens = torch.empty(args.sequences + 1, dtype=torch.int64, device="meta")
        tensors = described_tensor(gates_shape, gates_dtype), described_tensor(shape, dtype)
        how = {"dim": -1 if args.dim is None else args.dim, "reverse": args.reverse}
        of_gates = {"gates_dtype": gates_dtype, "gates_shape": list(gates_shape)}
        record = {**how, **of_gates, "sequences": args.sequences}
        reset = None
        if args.reset:
            import torch

            from scan_registry.kernels.linear_scan.op.stretches import reset_shape

            dim = how["dim"]
            if not -len(shape) <= dim < len(shape):
                dim = -1  # the call refuses it
            reset = torch.empty(reset_shape(shape, dim), dtype=torch.bool, device="meta")
        record["reset"] = bool(args.reset)
        return ParsedCall(tensors, {**how, "cu_seqlens": cu_seqlens, "reset": reset}, record)

    def run_on_cpu(self, problem: LinearScanProblem, tensors: Mapping[str, Tensor | None]) -> None:
        import torch

        from scan_registry.kernels.linear_scan.op.arguments import Options
        from scan_registry.kernels.linear_scan.op.plans import runner, summary_on_cpu

        if problem.direction == "summary":
            gates, tokens = tensors["gates"], tensors["tokens"]
            assert gates is not None
            assert tokens is not None
            summary = summary_on_cpu(gates, tokens, Options(-1, problem.reverse))
            for name, result in zip(("final_gate", "final_state"), summary, strict=True):
                out = tensors[name]
                assert out is not None
                out.copy_(result)
            return
        run = runner(problem, torch.device("cpu"), "auto")
        assert callable(run)  # the CPU has its own kernels
        run(tensors)

    def posed(self, case: Case, direction: str) -> tuple[LinearScanProblem, ...]:
        """A kernel that can sum up the gradient of broadcast gates is asked to."""
        import torch

        from scan_registry.kernels.linear_scan.op.problems import make_kernel_call

        gates = torch.empty(_gates_shape(case), dtype=getattr(torch, case.dtype), device="meta")
        full = torch.empty(case.shape, dtype=gates.dtype, device="meta")
        cu_seqlens = None
        if case.sequences:
            cu_seqlens = torch.empty(case.sequences + 1, dtype=torch.int64, device="meta")
        others = dict.fromkeys(_inputs(direction), full)
        # Tensors on meta count as aligned, as new ones are.
        call = make_kernel_call(
            "forward" if direction == "forward" else "backward",
            *(gates, others, cu_seqlens, case.dim, case.reverse, case.state),
        )
        fused = call.fused()
        return (call.problem,) if fused is None else (fused, call.problem)

    def tensors(
        self, case: Case, problem: LinearScanProblem, device: torch.device | str
    ) -> dict[str, Tensor | None]:
        """Results are not to be believed: the backward pass gets states that no scan has made."""
        import torch

        from scan_registry.kernels.linear_scan.op.problems import StateLayout

        first, second = case.sequence(device), case.sequence(device)
        cu_seqlens = case.bounds(device)
        layout = StateLayout.of(first, case.dim, cu_seqlens)
        outputs = {name: torch.empty_like(first) for name in self.outputs(case, problem)}
        if problem.sums:
            outputs["gates_grad"] = layout.sums(problem.sum_pieces())
        states: dict[str, Tensor | None] = {}
        if case.state:
            entering, leaving = _STATES[problem.direction]
            states = {name: case.entering(device) for name in entering}
            outputs[leaving] = layout.leaving(None)
        return {
            "gates": case.random_gates(device),
            "offsets": cu_seqlens,
            **dict(zip(_inputs(problem.direction), (first, second), strict=False)),
            **states,
            **outputs,
        }

    def outputs(self, case: Case, problem: LinearScanProblem) -> tuple[str, ...]:
        _, left = _STATES[problem.direction]
        # Kernels write no state of packed sequences without steps.
        leaving = (left,) if case.state and not case.sequences else ()
        if problem.direction == "forward":
            return ("states", *leaving)
        if case.gates != "full" and not problem.sums:
            return ("tokens_grad", *leaving)  # another kernel sums up the gates' gradient
        return ("gates_grad", "tokens_grad", *leaving)

    def partial_sums(self, problem: LinearScanProblem) -> Mapping[str, int]:
        return {"gates_grad": problem.time} if problem.sums else {}


def _inputs(direction: str) -> tuple[str, ...]:
    """Names of the sequences that a pass reads beside the gates."""
    return ("tokens",) if direction == "forward" else ("states", "states_grad")


def _gates_shape(case: Case) -> tuple[int, ...]:
    if case.gates == "full":
        return case.shape
    return (case.channels, 1) if case.dim == -1 else (case.channels,)


OPERATOR = LinearScan()
