"""Runs what JAX compiles for a GPU on the CPU: the problems, buffers and launches of a GPU, and the C code for CPUs in the
place of kernels, which take the same pointers and scalars.

Imported before any operator, in a process whose CUDA driver is the stub. ``launched`` lists the texts of the calls.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxing import jax

from scan_registry import kernels
from scan_registry.jax import ffi, primitives
from scan_registry.kernels.gated_scan.problem import HEADERS
from scan_registry.kernels.model import Variant
from scan_registry.ops import _cpu

__all__ = ["jax", "launched"]

launched: list[dict[str, Any]] = []


def linear_scan(
    variant: Variant, names: tuple[str, ...], scalars: Mapping[str, int]
) -> Callable[..., Any]:
    direction = variant.kernel.removeprefix("time_last_").removeprefix("channel_last_")
    layout = variant.kernel.removesuffix(f"_{direction}")
    numbers = (*[value for name, value in scalars.items() if name != "flags"], scalars["flags"] & 1)
    dtype = variant.text("dtype")
    dtypes = dtype, dict(variant.statics).get("gates", dtype)

    def run(pointers: tuple[int | None, ...]) -> None:
        own = pointers[: names.index("workspace")] if "workspace" in names else pointers
        workspace = (None,) if direction in ("forward", "backward") else ()
        more = (layout,) if direction == "reduction" else ()
        getattr(_cpu, direction)(*dtypes, own + workspace, numbers, 1, *more)

    return run


def gated_scan(
    variant: Variant, names: tuple[str, ...], scalars: Mapping[str, int]
) -> Callable[..., Any]:
    _, direction = variant.kernel.rsplit("_", 1)
    inputs = tuple(f"input{n}" for n in range(4))
    grads = tuple(f"{name}_grad" for name in inputs)
    strided = {
        "forward": (*inputs, "states", "initial_state", "final_state"),
        "backward": (
            *(*inputs, "states", "states_grad", *grads),
            *("initial_state", "final_state_grad", "initial_state_grad"),
        ),
    }[direction]
    shared = {**dict.fromkeys(inputs, "inputs"), **dict.fromkeys(grads, "grads")}
    shared |= dict.fromkeys(strided[-3 if direction == "backward" else -2 :], "state")
    sizes = [scalars[name] for name in ("batch", "channels", "time", "sequences", "reset_batch")]
    strides = [
        scalars[f"{shared.get(name, name)}_{dimension}"]
        for name in strided
        for dimension in ("batch", "channel", "time")
    ]
    kind = variant.text("kind")
    of_kind = HEADERS[kind]

    def run(pointers: tuple[int | None, ...]) -> None:
        own = dict(zip(names, pointers, strict=True))
        order = (*strided, "parameters", "reset", "offsets")
        if direction == "backward":
            order = (*order, "parameters_grad")
            if sums := own["parameters_grad"]:  # C code writes one of the parts
                size = 4 * scalars["parts"] * len(of_kind.parameters) * scalars["channels"]
                ctypes.memset(sums, 0, size)
        numbers = (*sizes, scalars["flags"] & 3, *strides)
        function = getattr(_cpu, f"gated_scan_{direction}")
        function(kind, variant.text("dtype"), tuple(own[name] for name in order), numbers, 1)

    return run


def causal_conv1d(
    variant: Variant, names: tuple[str, ...], scalars: Mapping[str, int]
) -> Callable[..., Any]:
    """In float32, weights too."""
    _, direction = variant.kernel.rsplit("_", 1)
    strided = ("x", "y") if direction == "forward" else ("x", "y_grad", "x_grad")
    sizes = [scalars[n] for n in ("batches", "channels", "time", "width", "sequences")]
    axes = ("batch", "channel", "time")
    strides = [scalars[f"{name}_{axis}"] for name in strided for axis in axes]
    numbers = (*sizes, scalars["flags"] & 1, *strides)
    batch, channels, _, width, _ = sizes
    shape = batch * scalars["pieces"], width + 1, channels

    def run(pointers: tuple[int | None, ...]) -> None:
        own: dict[str, Any] = dict(zip(names, pointers, strict=True))
        weight, bias = np.zeros((channels, width), "float32"), np.zeros(channels, "float32")
        own |= {"weight_grad": weight.ctypes.data, "bias_grad": bias.ctypes.data}
        order = tuple(own[name] for name in jax_of_convolutions()._POINTERS[direction])
        getattr(_cpu, f"causal_conv1d_{direction}")("float32", "float32", order, numbers, 1)
        if own.get("partials"):  # C code writes the sums of all pieces
            floats = ctypes.cast(own["partials"], ctypes.POINTER(ctypes.c_float))
            partials = np.ctypeslib.as_array(floats, shape)
            partials[:] = 0
            partials[0, :width], partials[0, width] = weight[:, ::-1].T, bias

    return run


def selective_scan(
    variant: Variant, names: tuple[str, ...], scalars: Mapping[str, int]
) -> Callable[..., Any]:
    """In float32, without packed sequences. The first checkpoint is the initial state; sums are in their first terms."""
    from scan_registry.kernels.selective_scan import jax_operator

    direction: Any = variant.kernel
    batch, channels, time = (scalars[name] for name in ("batch", "channels", "time"))
    states, groups = scalars["states"], channels // scalars["group_channels"]
    of_state = (batch, channels, states)

    def array(address: int, *shape: int) -> Any:
        floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, shape)

    def run(pointers: tuple[int | None, ...]) -> None:
        own: dict[str, Any] = dict(zip(names, pointers, strict=True))
        rows = batch * scalars.get("parts", 1)
        if direction == "adjoint":
            array(own["adjoints"], rows, channels, states)[:] = 1
            return
        if own["checkpoints"]:
            kept = array(own["checkpoints"], batch, time // 32 + 1, channels, states)
            if direction == "forward":
                initial = own["initial_state"]
                kept[:, 0] = array(initial, *of_state) if initial else 0
            elif scalars["parts"] > 1:
                assert (array(own["adjoints"], rows, channels, states) == 1).all()
        first = np.zeros(of_state, "float32") if direction == "forward" else kept[:, 0].copy()
        if direction == "backward":
            own["initial_state"] = first.ctypes.data
            unwanted = np.zeros(of_state, "float32")
            own["initial_grad"] = own["initial_grad"] or unwanted.ctypes.data
            ctas = -(-scalars["group_channels"] // (16 * (4 if states <= 16 else 2)))
            projection = (batch, groups, states, time)
            for name, terms, shape in (
                *(("A_grad", rows, (channels, states)), ("D_grad", rows, (channels,))),
                *(("bias_grad", rows, (channels,)), ("B_grad", ctas, projection)),
                ("C_grad", ctas, projection),
            ):
                if own[name]:
                    array(own[name], terms, *shape)[:] = 0
        strides: list[int] = []
        for name in jax_operator._STRIDED[direction]:
            like = {"out_grad": "grad", "delta_grad": "u_grad", "z_grad": "u_grad"}.get(name, name)
            axes = (
                ("batch", "group", "state", "time")
                if name in "BC"
                else ("batch", "channel", "time")
            )
            strides += [scalars[f"{like}_{axis}"] for axis in axes]
        order = (
            *jax_operator._STRIDED[direction],
            *jax_operator._DENSE,
            *jax_operator._OTHERS[direction],
        )
        final = np.zeros(of_state, "float32")
        if direction == "forward" and not own["final_state"]:
            own["final_state"] = final.ctypes.data
        sizes = (*(batch, channels, time, states, groups, groups), 0, scalars["flags"] & 1)
        addresses = tuple(own[name] for name in order)
        function = getattr(_cpu, f"selective_scan_{direction}")
        function("float32", addresses, (*sizes, *strides), 1)

    return run


#: What the kernels ``states`` and ``adjoint`` of ssd_scan got, which the one after them computes with here.
_handed_on: dict[str, Any] = {}


def _ssd_backward(own: dict[str, Any], call: Callable[..., Any]) -> None:
    """Gradients of ``call``, which takes the pointers' tensors and a gate."""
    assert bool((own["states"] == 1).all() and (own["adjoints"] == 1).all())
    own["initial_state"] = _handed_on["initial_state"]
    inputs = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")
    leaves = {n: own[n].float().requires_grad_() for n in inputs if own[n] is not None}
    out, final = call({**own, **leaves}, None)
    loss = (out * own["out_grad"].float()).sum()
    if _handed_on["final_grad"] is not None:
        loss = loss + (final * _handed_on["final_grad"]).sum()
    loss.backward()
    own["x_grad"].copy_(leaves["x"].grad)
    own["dt_grad"].copy_(leaves["dt"].grad)
    own["head_grads"].zero_()
    for terms, name in zip(own["head_grads"], ("A", "D", "dt_bias"), strict=True):
        if own[name] is not None and own[name].dim() == 1:
            terms[0, 0].copy_(leaves[name].grad)
    for name in ("B", "C"):
        terms = own[f"{name}_grad"]
        terms.zero_()
        terms[0].copy_(leaves[name].grad)
    if _handed_on["initial_grad"] is not None:
        _handed_on["initial_grad"].copy_(leaves["initial_state"].grad)


def ssd_scan(
    variant: Variant, names: tuple[str, ...], scalars: Mapping[str, int]
) -> Callable[..., Any]:
    """By torch's function. Whatever is summed up is in its first terms."""
    import torch

    import scan_registry

    direction = variant.kernel
    batch, time, heads, groups = (scalars[n] for n in ("batch", "time", "heads", "groups"))
    size, states, slots = (scalars[n] for n in ("head_size", "state_size", "slots"))
    narrow = getattr(torch, variant.text("dtype"))
    of_dt = torch.float32 if scalars["flags"] & 2 else narrow
    x, per_head = (batch, time, heads, size), (heads,)
    projection, state = (batch, time, groups, states), (batch, heads, size, states)
    of_slots, splits = (batch, slots, heads), scalars.get("splits", 1)
    skip = (heads, size) if scalars.get("D_channel") else per_head
    outlines: dict[str, tuple[tuple[int, ...], Any]] = {
        **dict.fromkeys(("x", "z", "out", "ungated", "out_grad", "x_grad"), (x, narrow)),
        **dict.fromkeys(("B", "C"), (projection, narrow)),
        **dict.fromkeys(("A", "dt_bias"), (per_head, torch.float32)),
        "D": (skip, torch.float32),
        "dt": (x[:3], of_dt),
        "dt_grad": (x[:3], torch.float32),
        "head_grads": ((3, *of_slots), torch.float32),
        **dict.fromkeys(
            ("B_grad", "C_grad"), ((splits, *projection), torch.float32 if splits > 1 else narrow)
        ),
        **dict.fromkeys(
            ("initial_state", "final_state", "final_grad", "initial_grad"), (state, torch.float32)
        ),
        **dict.fromkeys(("states", "adjoints"), ((*of_slots, size, states), narrow)),
    }

    def tensor(name: str, address: int) -> Any:
        shape, dtype = outlines[name]
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    limits = tuple(
        struct.unpack("<f", struct.pack("<i", scalars[name]))[0] for name in ("dt_low", "dt_high")
    )

    def call(own: Mapping[str, Any], gate: Any) -> Any:
        inputs = (own[name] for name in ("x", "dt", "A", "B", "C", "D"))
        softplus = bool(scalars["flags"] & 1)
        return scan_registry.ssd_scan(
            *(*inputs, gate, own["dt_bias"], softplus, limits, own["initial_state"]),
            return_final_state=True,
        )

    def run(pointers: tuple[int | None, ...]) -> None:
        pairs = zip(names, pointers, strict=True)
        own = {
            name: tensor(name, address)
            for name, address in pairs
            if address and name != "workspace"
        }
        own = dict.fromkeys(names) | own
        if direction == "forward":
            out, final = call(own, own["z"])
            for name, result in (("out", out), ("final_state", final)):
                if own[name] is not None:
                    own[name].copy_(result)
            if own["ungated"] is not None:
                own["ungated"].copy_(call(own, None)[0])
            return
        if direction == "states":
            own["states"].fill_(1)
            initial = own["initial_state"]
            _handed_on["initial_state"] = None if initial is None else initial.clone()
            return
        if direction == "adjoint":
            own["adjoints"].fill_(1)
            final = own["final_grad"]
            _handed_on["final_grad"] = None if final is None else final.clone()
            _handed_on["initial_grad"] = own["initial_grad"]
            return
        _ssd_backward(own, call)

    return run


def jax_of_convolutions() -> Any:
    from scan_registry.kernels.causal_conv1d import jax as module

    return module


#: By family: a function of addresses that does what a kernel does.
FAMILIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "causal_conv1d": causal_conv1d,
    "gated_scan": gated_scan,
    "linear_scan": linear_scan,
    "selective_scan": selective_scan,
    "ssd_scan": ssd_scan,
}


def resolve(text: str, ordinal: int) -> tuple[Any, ...]:
    words = json.loads(text)
    launched.append(words)
    variant = Variant.parse(words["gpu"])
    kernel = kernels.family(variant.family).kernel(variant.kernel, variant.language)
    assert set(words["scalars"]) >= {p.name for p in kernel.parameters if p.kind == "i64"}
    scalars = {p.name: words["scalars"][p.name] for p in kernel.parameters if p.kind == "i64"}
    run = FAMILIES[variant.family](variant, tuple(kernel.pointers), scalars)
    return run, tuple(words["places"]), (), (), ffi.ALIGNMENT


ffi._resolve = resolve
_on = primitives._Primitive.on
primitives._Primitive.on = lambda self, platform, *arrays, **static: _on(  # type: ignore[method-assign]
    self, "cuda" if platform == "cpu" else platform, *arrays, **static
)
