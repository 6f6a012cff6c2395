"""GPUs on the command line: those that are here, and those that arguments describe."""

from __future__ import annotations

import argparse
import re
from typing import Any

from scan_registry.cli.errors import UsageError
from scan_registry.dispatch.fit import dotted
from scan_registry.hardware.device import Device, cuda_of_driver, described, device
from scan_registry.hardware.products import named, names
from scan_registry.hardware.target import FIRST_CUDA, Capability, CudaVersion, Target

_INVALID_DEVICE, _NO_DEVICE = 101, 100  # CUDA_ERROR_…

#: What describes a GPU beside its architecture, as attributes of parsed arguments.
_DETAILS = ("driver", "sms", "shared_memory")
_CAPABILITY = re.compile(r"([1-9]\d?)\.(\d)", re.ASCII)
#: What compilers and lists of architectures call one, and shorter forms: sm_90a, compute_90, 12.1f, sm-90, 90.
_ALMOST = re.compile(r"(?:sm|compute|ptx|cc)?[\s_-]*([1-9]\d?)\.?(\d)[af]?", re.ASCII)


class _Once(argparse.Action):
    """The option's value; a second one is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice; ask about one GPU at a time")
        setattr(namespace, self.dest, values)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a GPU."""
    parser.add_argument(
        *("--for", "--arch"),
        dest="arch",
        metavar="GPU",
        action=_Once,
        help="a GPU that need not be here, by its name, compute capability or architecture: H100, 9.0, sm_90",
    )
    parser.add_argument(
        "--driver", metavar="X", help="its driver, or the CUDA version of it: 575, 575.57.08, 12.9"
    )
    parser.add_argument("--sms", type=int, metavar="N", help="its SMs")
    parser.add_argument(
        "--shared-memory", type=int, metavar="BYTES", help="shared memory that a block may have"
    )


def gpu_of(args: argparse.Namespace) -> Device | None:
    """The GPU that the arguments describe, or None; ``UsageError`` if they describe none."""
    details = {name: getattr(args, name) for name in _DETAILS if getattr(args, name) is not None}
    if args.arch is None:
        if details:
            name = next(iter(details)).replace("_", "-")
            raise UsageError(f"--{name} describes a GPU that is not here; it needs --for")
        return None
    for name in ("sms", "shared_memory"):
        if details.get(name, 1) < 1:
            label = name.replace("_", "-")
            raise UsageError(f"--{label} is {details[name]}; accepted are positive numbers")
    capability, product, sm_count = product_of(args.arch)
    return described(
        capability,
        name=product,
        driver=_driver(details["driver"]) if "driver" in details else None,
        sm_count=details.get("sms", sm_count),
        shared_memory_per_block=details.get("shared_memory"),
    )


def assumed(args: argparse.Namespace, there: Device) -> tuple[str, ...]:
    """What was not said of the GPU that the arguments describe, with what was taken for it."""
    if args.arch is None:
        return ()
    _, name, _ = product_of(args.arch)
    sms = f"{there.sm_count} SMs, as a whole {name} has" if name else f"{there.sm_count} SMs"
    said = {
        "driver": f"a driver for CUDA {dotted(there.driver)}, the latest that is known (--driver)",
        "sms": f"{sms} (--sms)",
        "shared_memory": f"{there.shared_memory_per_block} bytes of shared memory per block (--shared-memory)",
    }
    return tuple(text for option, text in said.items() if getattr(args, option) is None)


def product_of(text: str) -> tuple[Capability, str | None, int | None]:
    """The capability of a GPU; also its name and the number of its SMs if ``text`` is the name of a
    product."""
    if product := named(text):
        return product.capability, product.name, product.sm_count
    word = text.strip().lower()
    number = _CAPABILITY.fullmatch(word)
    try:
        target = Target.parse(f"sm_{number[1]}{number[2]}" if number else word)
    except ValueError:
        target = None
    if target is None or target.is_ptx or target.suffix:
        guess = _like(word) or f"names are {', '.join(names())}"
        raise UsageError(
            f"--for is {text!r}; accepted are a GPU's name, its compute capability, such as 9.0, and its "
            f"architecture, such as sm_90; {guess}"
        )
    return target.capability, None, None


def _like(word: str) -> str | None:
    """A question that suggests known names or an architecture for an unknown name; None if nothing is like it."""
    from difflib import get_close_matches  # imported here, as only an unknown name needs it

    plain = {name.lower(): name for name in names()}
    bare = word.removeprefix("nvidia").strip()
    meant = _ALMOST.fullmatch(word)
    hits = []
    if meant and (int(meant[1]), int(meant[2])) in FIRST_CUDA:
        hits.append(f"sm_{meant[1]}{meant[2]}")
    digits = re.sub(r"\D", "", bare)
    hits += [name for key, name in plain.items() if bare and (bare in key or key in bare.split())]
    near = [plain[key] for key in get_close_matches(bare, plain, 4, 0.6)]
    hits += near[:2]
    hits += [name for key, name in plain.items() if len(digits) > 2 and digits in key]
    close = list(dict.fromkeys([*hits, *near]))[:5]
    return f"did you mean {' or '.join(close)}?" if close else None


def _driver(text: str) -> CudaVersion:
    try:
        return cuda_of_driver(text.strip().lower().removeprefix("cuda").strip())
    except ValueError as error:
        raise UsageError(
            f"--driver is {text!r}; accepted are a driver's version, such as 575 or 575.57.08, and "
            "the CUDA version that it supports, such as 12.9"
        ) from error


def visible() -> tuple[Device, ...]:
    """The GPUs of this machine, in torch's order.

    ``RuntimeError`` if there is no driver, and its ``DriverError`` if the driver fails.
    """
    from scan_registry.hardware.driver import DriverError

    devices: list[Device] = []
    while True:
        try:
            devices.append(device(len(devices)))
        except DriverError as error:
            if error.status == (_INVALID_DEVICE if devices else _NO_DEVICE):
                return tuple(devices)
            raise
