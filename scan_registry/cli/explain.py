"""``scan-registry explain``: what a call would run on a GPU, and why not something else."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scan_registry.artifact.archive import Archive, ArchiveError
from scan_registry.catalog.inventory import catalogue
from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import add_gpu, gpu_of, visible
from scan_registry.cli.streams import complain
from scan_registry.cli.tables import say, screen
from scan_registry.diagnostics.explanation import Explanation, explain_for
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import BACKENDS, System
from scan_registry.kernels import families
from scan_registry.ops.operator import DTYPES, Operator, Option, known, operators, parse_shape
from scan_registry.version import __version__

DESCRIPTION = (
    "Shows, for the forward and the backward pass of a call, what is chosen, how it "
    "is launched, why, and what would run in its place. Runs nothing, and needs no GPU."
)
EPILOG = (
    "Exit status: 0; 1 if the call would raise NoKernelError; 2 for arguments that cannot "
    "be meant, or if an installed archive is damaged. The JSON document is described by scan_registry/schemas/explain.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    by_name = operators()
    parser.add_argument("operator", help=f"one of {', '.join([*by_name, *_others()])}")
    parser.add_argument("--dtype", required=True, metavar="X", help=" ".join(DTYPES))
    shapes = "; ".join(f"for {operator.name} {operator.shape}" for operator in by_name.values())
    parser.add_argument("--shape", required=True, metavar="N,N,…", help=shapes)
    for option, takers in _options().values():
        meanings = dict[str, list[str]]()
        for name, meaning in takers.items():
            meanings.setdefault(meaning, []).append(name)
        text = "; ".join(f"of {', '.join(names)}: {words}" for words, names in meanings.items())
        parser.add_argument(*option.names, **{**option.settings, "help": text})
    special = [
        f"; of {operator.name} also {' '.join(more)}"
        for operator in by_name.values()
        if (more := [word for word in operator.backends if word not in BACKENDS])
    ]
    parser.add_argument(
        "--backend", default="auto", metavar="X", help=" ".join(BACKENDS) + "".join(special)
    )
    parser.add_argument(
        "--device", metavar="X", help="cpu, or cuda:N of this machine; default: its first GPU"
    )
    add_gpu(parser)
    levels = " ".join(policy.LEVELS)
    parser.add_argument("--require", metavar="LEVEL", help=f"the lowest tier to allow: {levels}")
    parser.add_argument(
        "--all", action="store_true", help="every fact, and a line for each that was not taken"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def _others() -> dict[str, tuple[Operator, Mapping[str, str]]]:
    """Functions whose calls are calls of an operator with some options, by name."""
    return {
        name: (operator, options)
        for operator in operators().values()
        for name, options in operator.others.items()
    }


def _operator(args: argparse.Namespace) -> Operator:
    """The operator that was named. Options that the name stands for are put into ``args``."""
    by_name, others = operators(), _others()
    for operator in by_name.values():
        if args.operator in operator.kinds:
            advice = f"explain {operator.name} --kind {args.operator}"
            raise UsageError(f"{args.operator} is a kind: {advice}")
    name = known("operator", args.operator, [*by_name, *others])
    if name in by_name:
        return by_name[name]
    operator, options = others[name]
    for option, value in options.items():
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} is no option of {name}")
        setattr(args, option, value)
    return operator


def _options() -> dict[str, tuple[Option, dict[str, str]]]:
    """The options of operators, and which operators have each. If several have the same option, the first one
    declares it."""
    by_dest: dict[str, tuple[Option, dict[str, str]]] = {}
    for operator in operators().values():
        for option in operator.options:
            takers = by_dest.setdefault(option.dest, (option, {}))[1]
            takers[operator.name] = option.settings["help"]
    return by_dest


def run(args: argparse.Namespace) -> int:
    """Explain the call; ``UsageError`` for arguments that are not valid."""
    if args.operator not in operators() and args.operator in families():
        raise UsageError(
            f"no function calls the kernels of {args.operator}; explain takes a call of {', '.join(operators())}, and "
            "`scan-registry doctor` shows what each kernel gets"
        )
    try:
        there, explanation, call = _explained(args)
    except (TypeError, ValueError) as error:  # of the operator's checks, too, and of the policy's
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(document(explanation, call), indent=2))
    else:
        console = screen()
        say(console, explanation.text(everything=True) if args.all else explanation.brief())
        if not args.all and explanation.steps:
            say(console, "Every fact, and a line for each that was not taken: --all.")
    damage = [text for archive in there.archives if (text := _damage(archive))]
    for text in damage:
        complain(f"scan-registry: warning: {text}")
    if damage:
        return 2
    return 0 if explanation.runs else 1


def _explained(args: argparse.Namespace) -> tuple[System, Explanation, dict[str, Any]]:
    """For what system, the explanation, and the call as a document has it."""
    operator = _operator(args)
    dtype = DTYPES[known("--dtype", args.dtype, [*DTYPES])]
    known("--backend", args.backend, operator.backends)
    if args.require is not None:
        known("--require", args.require, [*policy.LEVELS])
    _check_options(operator, args)
    shape = parse_shape("--shape", args.shape)
    parsed, there = operator.parse(dtype, shape, args), _system(args)
    with policy.require(args.require or "reference"):
        policy.lowest()  # raises for an unknown level, on the CPU too
        explanation = explain_for(
            *(there, operator.name, *parsed.args), **parsed.kwargs, backend=args.backend
        )
    explanation = replace(explanation, driver_is_assumed=bool(args.arch) and args.driver is None)
    call = {"dtype": dtype, "shape": list(shape), "backend": args.backend, **parsed.record}
    return there, explanation, call


def _damage(archive: Archive) -> str | None:
    """What is wrong with an archive's manifest, or None; the binaries' bytes are not read."""
    try:
        archive.binaries  # noqa: B018  # reads the manifest
    except ArchiveError as error:
        return str(error)
    return None


def document(explanation: Explanation, call: dict[str, Any]) -> dict[str, Any]:
    """The stable form, as ``schemas/explain.json`` describes it: keys are only ever added."""
    return {"version": __version__, "call": call, **explanation.to_json()}


def _check_options(operator: Operator, args: argparse.Namespace) -> None:
    """Refuse options of other operators."""
    for name, (option, takers) in _options().items():
        if operator.name not in takers and getattr(args, name) != option.default:
            end = f"; {operator.instead[name]}" if name in operator.instead else ""
            raise UsageError(f"{option.names[0]} is no option of {args.operator}{end}")


def _system(args: argparse.Namespace) -> System:
    """What there is to choose from, on the GPU that is described or on one that is here."""
    from scan_registry.cache import tuned
    from scan_registry.runtime import jit

    device = gpu_of(args)
    described = device is not None
    if device and args.device:
        raise UsageError("--for and --device both say which GPU; give one of them")
    if device is None and args.device == "cpu":
        return System(None)
    if args.device is not None and not re.fullmatch(r"cuda(:\d+)?", args.device):
        raise UsageError(f"--device is {args.device!r}; accepted are cpu, cuda and cuda:N")
    if device is None:
        try:
            gpus = visible()
        except RuntimeError as error:
            gpus, reason = (), f" ({error})"
        else:
            reason = ""
        accepted = [*(f"cuda:{ordinal}" for ordinal in range(len(gpus))), "cpu"]
        if not gpus:
            raise UsageError(
                f"no GPU is visible here{reason}; --for describes a GPU that need not be here, "
                "such as --for H100, and --device cpu asks about calls on the CPU"
            )
        name = "cuda:0" if args.device in (None, "cuda") else args.device
        known("--device", name, accepted)
        device = gpus[accepted.index(name)]
    installed = catalogue()
    return System(
        device,
        installed.archives,
        jit.toolchains(),
        installed.denied,
        tuned=None if described else tuned.archive_of(device),
    )
