"""``scan-registry explain``: what a call would run on a GPU, and why not something else."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from scan_registry.catalog.inventory import catalogue
from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import add_gpu, gpu_of, visible
from scan_registry.cli.tables import SHORT_DTYPES
from scan_registry.diagnostics.explanation import OPERATORS, Explanation, backends_of, explain_for
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import BACKENDS, System
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

#: By what each may be called.
DTYPES = {word: name for name, short in SHORT_DTYPES.items() for word in (name, short)}
_MOST_ELEMENTS = 2**60  # their bytes can still be counted
_MOST_SEQUENCES = 2**31 - 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    parser = commands.add_parser(
        "explain",
        description="Shows, for the forward and the backward pass of a call, what is chosen, how it "
        "is launched, and why nothing else was. Runs nothing, and needs no GPU.",
        epilog="Exit status: 0; 1 if the call would raise NoKernelError; 2 for arguments that cannot "
        "be meant. The JSON document is described by scan_registry/schemas/explain.json.",
    )
    parser.add_argument("operator", help=f"one of {', '.join(OPERATORS)}")
    parser.add_argument("--dtype", required=True, metavar="X", help=" ".join(DTYPES))
    parser.add_argument(
        "--shape",
        required=True,
        metavar="N,N,…",
        help="of each tensor, such as 8,1536,4096; for rnn batch, time, heads and units of a head",
    )
    parser.add_argument(
        "--dim", type=int, help="of linear_scan: the time dimension; default: the last"
    )
    parser.add_argument("--gates-dtype", metavar="X", help="of linear_scan: where it differs")
    parser.add_argument(
        "--gates-shape", metavar="N,N,…", help="of linear_scan: where they are broadcast"
    )
    parser.add_argument("--reverse", action="store_true", help="of linear_scan: scan from the end")
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="of linear_scan: how many are packed along the time dimension",
    )
    parser.add_argument(
        "--function", metavar="X", help=f"of rnn: {' '.join(SIZES)}; default: {next(iter(SIZES))}"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="X",
        help=" ".join(BACKENDS) + "; of rnn also cuda_fused cuda_alternating",
    )
    parser.add_argument("--device", metavar="cuda:N", help="a GPU of this machine, else its first")
    add_gpu(parser)
    parser.add_argument("--require", metavar="LEVEL", help=" ".join(policy.LEVELS))
    parser.add_argument("--all", action="store_true", help="a line for each that was not taken")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Explain the call; ``UsageError`` for arguments that cannot be meant."""
    for name, accepted in (("operator", OPERATORS), ("dtype", DTYPES)):
        _known(name if name == "operator" else f"--{name}", getattr(args, name), [*accepted])
    _known("--backend", args.backend, [*backends_of(args.operator)])
    if args.require is not None:
        _known("--require", args.require, [*policy.LEVELS])
    _check_options(args)
    shape, there = _shape("--shape", args.shape), _system(args)
    tensors, options = (_of_rnn if args.operator == "rnn" else _of_linear_scan)(args, shape)
    try:
        with policy.require(args.require or "reference"):
            found = explain_for(there, args.operator, *tensors, **options, backend=args.backend)
    except (
        TypeError,
        ValueError,
    ) as error:  # of the operator's own checks, or of SCAN_REGISTRY_REQUIRE
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(document(found, args, shape), indent=2))
    else:
        print(found.text(everything=args.all))
        if not args.all and any(step.decision.rejected for step in found.steps):
            print("\nOne line for each that was not taken: --all.")
    return 0 if found.runs else 1


def document(
    found: Explanation, args: argparse.Namespace, shape: tuple[int, ...]
) -> dict[str, Any]:
    """The stable form, as ``schemas/explain.json`` describes it: keys are only ever added."""
    call: dict[str, Any] = {
        "dtype": DTYPES[args.dtype],
        "shape": list(shape),
        "backend": args.backend,
    }
    if args.operator == "rnn":
        call["function"] = args.function or next(iter(SIZES))
    else:
        call |= {
            "dim": -1 if args.dim is None else args.dim,
            "gates_dtype": DTYPES[args.gates_dtype or args.dtype],
            "gates_shape": list(_shape("--gates-shape", args.gates_shape or args.shape)),
            "reverse": args.reverse,
            "sequences": args.sequences,
        }
    return {"version": __version__, "call": call, **found.to_json()}


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options of another operator, and values out of range."""
    others = ["function"]
    if args.operator == "rnn":
        others = ["dim", "gates_dtype", "gates_shape", "reverse", "sequences"]
    for name in others:
        if getattr(args, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is no option of {args.operator}")
    if args.gates_dtype is not None:
        _known("--gates-dtype", args.gates_dtype, [*DTYPES])
    if args.function is not None:
        _known("--function", args.function, [*SIZES])
    if args.sequences is not None and not 1 <= args.sequences <= _MOST_SEQUENCES:
        raise UsageError(
            f"--sequences is {args.sequences}; accepted are numbers from 1 to {_MOST_SEQUENCES}"
        )


def _known(name: str, value: str, accepted: list[str]) -> None:
    if value not in accepted:
        raise UsageError(f"{name} is {value!r}; accepted are {', '.join(accepted)}")


def _shape(option: str, text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and len(size) < 100 for size in sizes):
        raise UsageError(f"{option} is {text!r}; accepted are sizes such as 8,1536,4096")
    shape = tuple(map(int, sizes))
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise UsageError(f"{option} is {text!r}; accepted are at most 2**60 elements")
    return shape


def _tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Contiguous and aligned, with derivatives asked for."""
    import torch

    return torch.empty(
        shape, dtype=getattr(torch, DTYPES[dtype]), device="meta", requires_grad=True
    )


def _of_linear_scan(
    args: argparse.Namespace, shape: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    import torch

    bounds = None
    if args.sequences is not None:
        bounds = torch.empty(args.sequences + 1, dtype=torch.int64, device="meta")
    of_gates = shape if args.gates_shape is None else _shape("--gates-shape", args.gates_shape)
    tensors = _tensor(of_gates, args.gates_dtype or args.dtype), _tensor(shape, args.dtype)
    dim = -1 if args.dim is None else args.dim
    return tensors, {"dim": dim, "reverse": args.reverse, "cu_seqlens": bounds}


def _of_rnn(
    args: argparse.Namespace, shape: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    if len(shape) != 4:
        raise UsageError(
            f"--shape is {args.shape!r}; rnn takes batch, time, heads and units, such as 16,1024,1,768"
        )
    batch, time, heads, dim = shape
    function = args.function or next(iter(SIZES))
    sizes = SIZES[function]
    tensors = (
        _tensor((batch, time, sizes.inputs, heads, dim), args.dtype),
        _tensor((sizes.recurrent, heads, dim, dim), args.dtype),
        _tensor((sizes.bias, heads, dim), args.dtype),
    )
    return tensors, {"function": function}


def _system(args: argparse.Namespace) -> System:
    """What there is to choose from, on the GPU that is described or on one that is here."""
    from scan_registry.cache import tuned
    from scan_registry.runtime import jit

    device = gpu_of(args)
    described = device is not None
    if device and args.device:
        raise UsageError("--for and --device both say which GPU; give one of them")
    if device is None:
        try:
            gpus = visible()
        except RuntimeError as error:
            gpus, reason = (), f" ({error})"
        else:
            reason = ""
        accepted = [f"cuda:{ordinal}" for ordinal in range(len(gpus))]
        if not gpus:
            raise UsageError(
                f"no GPU is visible here{reason}; --for describes one that need not be, "
                "such as --for H100"
            )
        name = "cuda:0" if args.device in (None, "cuda") else args.device
        _known("--device", name, accepted)
        device = gpus[accepted.index(name)]
    found = catalogue()
    return System(
        device,
        found.archives,
        jit.toolchains(),
        found.denied,
        tuned=None if described else tuned.archive_of(device),
    )
