"""GPUs on the command line: those that are here, and those that arguments describe."""

from __future__ import annotations

import argparse

from scan_registry.cli.errors import UsageError
from scan_registry.hardware.device import Device, cuda_of_driver, described, device
from scan_registry.hardware.target import CudaVersion, Target

_INVALID_DEVICE, _NO_DEVICE = 101, 100  # CUDA_ERROR_…

#: What describes a GPU beside its architecture, as attributes of parsed arguments.
_DETAILS = ("driver", "sms", "shared_memory")


def add_gpu(parser: argparse.ArgumentParser, option: str) -> None:
    """Declare the arguments that describe a GPU, of which ``option`` names the architecture."""
    parser.add_argument(
        option, dest="arch", metavar="ARCH", help="a GPU that need not be here, such as sm_90"
    )
    parser.add_argument(
        "--driver", metavar="X", help="its driver, or the CUDA version of it: 575, 575.57.08, 12.9"
    )
    parser.add_argument("--sms", type=int, metavar="N", help="its SMs")
    parser.add_argument(
        "--shared-memory", type=int, metavar="BYTES", help="shared memory that a block may have"
    )


def gpu_of(args: argparse.Namespace, option: str) -> Device | None:
    """The GPU that the arguments describe, or None; ``UsageError`` if they describe none."""
    given = {name: getattr(args, name) for name in _DETAILS if getattr(args, name) is not None}
    if args.arch is None:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise UsageError(f"--{name} describes a GPU that is not here; it needs {option}")
        return None
    for name in ("sms", "shared_memory"):
        if given.get(name, 1) < 1:
            label = name.replace("_", "-")
            raise UsageError(f"--{label} is {given[name]}; accepted are positive numbers")
    return described(
        _architecture(args.arch, option).capability,
        driver=_driver(given["driver"]) if "driver" in given else None,
        sm_count=given.get("sms"),
        shared_memory_per_block=given.get("shared_memory"),
    )


def _architecture(text: str, option: str) -> Target:
    try:
        target = Target.parse(text)
    except ValueError:
        target = None
    if target is None or target.is_ptx or target.suffix:
        raise UsageError(f"{option} is {text!r}; accepted is a GPU's architecture, such as sm_90")
    return target


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

    found: list[Device] = []
    while True:
        try:
            found.append(device(len(found)))
        except DriverError as error:
            if error.status == (_INVALID_DEVICE if found else _NO_DEVICE):
                return tuple(found)
            raise
