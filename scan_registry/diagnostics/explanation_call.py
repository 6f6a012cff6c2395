"""What ``explain`` says of the call itself, before it says what each kernel gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, get_type_hints

from scan_registry.dispatch.fit import Tier, dotted
from scan_registry.dispatch.select import Decision
from scan_registry.hardware.device import Device
from scan_registry.kernels.model import Problem
from scan_registry.ops.operator import KernelCall, Operator

#: The decision for each kernel of a call, by the kernel's name.
Steps = Sequence[tuple[str, Decision]]
#: Sizes of problems by their attributes, with the words for them.
_SIZES = {
    "batch": "batch",
    "heads": "heads",
    "channels": "channels",
    "rows": "batch · channels",
    "head_size": "size of a head",
    "dim": "units of a head",
    "time": "time",
}
_CONTIGUOUS = {"time_last": "time is contiguous", "channel_last": "channels are contiguous"}


def heading(operator: str, where: str, problem: Problem | None, steps: Steps) -> str:
    """The operator and the place, what was understood, and what compiles. Without a kernel, only the former."""
    title = f"{operator} on {where}"
    if problem is None or not steps:
        return title
    return f"{title}\n  call       {understood(problem)}\n  first call {compiling(steps)}"


def place(device: Device | None, *, assumed: bool) -> str:
    """The GPU and its driver, of which the latest one is ``assumed`` where none was read or named; or the CPU."""
    if device is None:
        return "the CPU"
    driver = f"driver for CUDA {dotted(device.driver)}"
    return f"{device.name} ({device.arch}), {f'assuming a {driver}' if assumed else driver}"


def understood(problem: Problem) -> str:
    """Dtype, sizes and layout, such as ``bfloat16, batch 8, channels 1536, time 4096; time is contiguous``."""
    values = vars(problem)
    sizes, layout = dict(values), str(values.get("layout"))
    if "outer" in values:  # scans merge dimensions that lie like one
        sizes["batch"] = values["outer"] * values["batch"]
        if sizes["batch"] == 1 and layout == "time_last":
            sizes["rows"] = sizes.pop("channels")
            del sizes["batch"]
    gates = values.get("gates_dtype", problem.dtype)
    words = [str(values[name]) for name in ("kind", "function") if name in values]
    words.append(problem.dtype if gates == problem.dtype else f"{problem.dtype}, gates {gates}")
    words += [f"{word} {sizes[name]}" for name, word in _SIZES.items() if name in sizes]
    if values.get("sequences"):
        words.append(f"packed sequences {values['sequences']}")
    return "; ".join([", ".join(words), *([_CONTIGUOUS[layout]] if layout in _CONTIGUOUS else [])])


def compiling(steps: Steps) -> str:
    """What compiles at the first call, and which of its kernels, by their names."""
    names: dict[str, list[str]] = {}
    for name, decision in steps:
        names.setdefault(_compiling(decision), []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(of)}: {words}" for words, of in names.items())


def _compiling(decision: Decision) -> str:
    winner, device = decision.winner, decision.system.device
    if device is None:
        return "Nothing compiles: the call is on the CPU"
    if winner is None:
        return "Nothing compiles: nothing runs"
    if winner.variant is None:
        return "Nothing compiles: no kernel is used"
    if winner.tier is Tier.JIT:
        return "Compiled on your machine at the first call, and kept in a cache"
    if winner.tier is Tier.PTX:
        return "The driver compiles PTX at the first call, and keeps the result"
    return f"Nothing compiles: machine code for {winner.target} is installed"


def refuse_device(operator: Operator, name: str, kwargs: Mapping[str, Any]) -> None:
    """``TypeError`` for a ``device``, which no operator has: the tensors' own device counts."""
    if "device" in kwargs and "device" not in signature(operator.function).parameters:
        raise TypeError(
            f"explain({name}, …) takes no device: it says what runs on the device of the tensors. For a GPU that need not be in "
            f"this machine there is the command `scan-registry explain {name} --for H100 --dtype … --shape …`"
        )


def described(operator: Operator, args: Any, kwargs: Any) -> tuple[Mapping[str, KernelCall], Any]:
    """What the call poses, and the device of its tensors; ``TypeError`` for no such call."""
    import torch

    types = get_type_hints(operator.function)
    arguments = signature(operator.function).bind(*args, **kwargs).arguments
    tensors = [value for name, value in arguments.items() if types[name] is torch.Tensor]
    calls = operator.describe(*args, **kwargs)  # which checks them
    first = tensors[0]
    return calls, (first[0] if isinstance(first, tuple) else first).device
