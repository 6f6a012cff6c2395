"""``scan-registry explain``: what a call would run on a GPU, and why not something else."""

from __future__ import annotations

import argparse
import json
import math
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from scan_registry import policy
from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import add_gpu, gpu_of, visible
from scan_registry.cli.tables import SHORT_DTYPES
from scan_registry.explanation import OPERATORS, Explanation, explain_for
from scan_registry.inventory import catalogue
from scan_registry.select import BACKENDS, System

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
        help="say what a call would run, and why",
        description="Shows, for the forward and the backward pass of a call, what is chosen, how it "
        "is launched, and why nothing else was. Runs nothing, and needs no GPU.",
        epilog="Exit status: 0; 1 if the call would raise NoKernelError; 2 for arguments that cannot "
        "be meant. The JSON document is described by scan_registry/schemas/explain.json.",
    )
    parser.add_argument("operator", help=f"one of {', '.join(OPERATORS)}")
    parser.add_argument("--dtype", required=True, metavar="X", help=" ".join(DTYPES))
    parser.add_argument(
        "--shape", required=True, metavar="N,N,…", help="of each tensor, such as 8,1536,4096"
    )
    parser.add_argument("--dim", type=int, default=-1, help="the time dimension; default: the last")
    parser.add_argument("--gates-dtype", metavar="X", help="where it differs")
    parser.add_argument("--gates-shape", metavar="N,N,…", help="where they are broadcast")
    parser.add_argument("--reverse", action="store_true", help="scan from the end")
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="how many are packed along the time dimension"
    )
    parser.add_argument("--backend", default="auto", metavar="X", help=" ".join(BACKENDS))
    parser.add_argument("--device", metavar="cuda:N", help="a GPU of this machine, else its first")
    add_gpu(parser, "--arch")
    parser.add_argument("--require", metavar="LEVEL", help=" ".join(policy.LEVELS))
    parser.add_argument("--all", action="store_true", help="a line for each that was not taken")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def run(args: argparse.Namespace) -> int:
    """Explain the call; ``UsageError`` for arguments that cannot be meant."""
    for name, accepted in (("operator", OPERATORS), ("dtype", DTYPES), ("backend", BACKENDS)):
        _known(name if name == "operator" else f"--{name}", getattr(args, name), [*accepted])
    if args.gates_dtype is not None:
        _known("--gates-dtype", args.gates_dtype, [*DTYPES])
    if args.require is not None:
        _known("--require", args.require, [*policy.LEVELS])
    if args.sequences is not None and not 1 <= args.sequences <= _MOST_SEQUENCES:
        raise UsageError(
            f"--sequences is {args.sequences}; accepted are numbers from 1 to {_MOST_SEQUENCES}"
        )
    shape, there = _shape("--shape", args.shape), _system(args)
    try:
        with policy.require(args.require or "reference"):
            found = explain_for(
                there,
                args.operator,
                *_tensors(args, shape),
                dim=args.dim,
                reverse=args.reverse,
                cu_seqlens=_bounds(args),
                backend=args.backend,
            )
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
    return {
        "version": version("scan-registry"),
        "call": {
            "dtype": DTYPES[args.dtype],
            "shape": list(shape),
            "dim": args.dim,
            "backend": args.backend,
            "gates_dtype": DTYPES[args.gates_dtype or args.dtype],
            "gates_shape": list(_shape("--gates-shape", args.gates_shape or args.shape)),
            "reverse": args.reverse,
            "sequences": args.sequences,
        },
        **found.to_json(),
    }


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


def _tensors(args: argparse.Namespace, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What every operator takes, contiguous and aligned, with derivatives asked for."""
    import torch

    def tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(
            shape, dtype=getattr(torch, DTYPES[dtype]), device="meta", requires_grad=True
        )

    of_gates = shape if args.gates_shape is None else _shape("--gates-shape", args.gates_shape)
    return tensor(of_gates, args.gates_dtype or args.dtype), tensor(shape, args.dtype)


def _bounds(args: argparse.Namespace) -> Tensor | None:
    import torch

    if args.sequences is None:
        return None
    return torch.empty(args.sequences + 1, dtype=torch.int64, device="meta")


def _system(args: argparse.Namespace) -> System:
    """What there is to choose from, on the GPU that is described or on one that is here."""
    from scan_registry import jit, local

    device = gpu_of(args, "--arch")
    described = device is not None
    if device and args.device:
        raise UsageError("--arch and --device both say which GPU; give one of them")
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
                f"no GPU is visible here{reason}; --arch describes one that need not be, "
                "such as --arch sm_90"
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
        tuned=None if described else local.tuned(device),
    )
