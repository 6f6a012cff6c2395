"""The packages that the benchmarks compare scans with, and how their users call them.

To have them: ``pip install accelerated-scan==0.3.1``, of which ``warp`` also needs a CUDA toolkit and a
C++ compiler, since it compiles when it is imported; and ``sequential_scan``, built from its sources.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scan_registry.base.package import NAME
from scan_registry.catalog import distributions

if TYPE_CHECKING:
    from scan_registry.kernels.linear_scan.op.bench import Case

#: Gates and tokens, (batch, channels, time) and contiguous, to states.
Scan = Callable[[Any, Any], Any]
#: A module, a direction, gates and two further sequences, to a call of the bare kernel.
Kernel = Callable[[ModuleType, str, Any, Any, Any], Callable[[], Any]]


@dataclass(frozen=True)
class Baseline:
    """One implementation of x[t] = gates[t] * x[t-1] + tokens[t].

    distribution  what to install
    module        what to import; importing it is part of what a cold start costs
    function      the module's function that its users call
    kernel        how to launch the kernels without that function's checks and zero fills
    refuses       case -> None, or why the kernels cannot run it
    captured      whether a CUDA graph can record the launches
    """

    name: str
    distribution: str
    module: str
    function: str
    kernel: Kernel | None = None
    refuses: Callable[[Case], str | None] = lambda case: None
    captured: bool = True

    @property
    def version(self) -> str | None:
        """The installed version, or None if it is not installed."""
        return distributions.version(self.distribution)

    def load(self) -> Scan:
        """What users call; imports, and for some baselines compiles, what it needs."""
        scan: Scan = getattr(importlib.import_module(self.module), self.function)
        return scan

    def refusal(self, case: Case) -> str | None:
        """Why it does not take the case, or None: none of them takes options."""
        return f"it does not take {case.options}" if case.options else self.refuses(case)

    def kernel_call(
        self, case: Case, direction: str, device: Any
    ) -> Callable[[], Callable[[], Any]] | None:
        """A function that makes a call with inputs of its own, or None where there is no kernel.

        The call launches the forward or the backward kernel into newly allocated outputs, which it
        returns.
        """
        kernel = self.kernel
        if kernel is None or self.refuses(case):
            return None
        module = importlib.import_module(self.module)

        def make() -> Callable[[], Any]:
            sequences = case.sequence(device), case.sequence(device)
            return kernel(module, direction, case.random_gates(device), *sequences)

        return make


# --- accelerated-scan ------------------------------------------------------------------------

_NARROW = ("float32", "bfloat16", "float16")


def _takes(case: Case, layout: str, dtypes: tuple[str, ...]) -> str | None:
    if case.layout != layout:
        return f"layout is {case.layout}; it takes {layout}"
    if case.dtype not in dtypes:
        return f"dtype is {case.dtype}; it takes {', '.join(dtypes)}"
    return None


def _contiguous_time(case: Case, dtypes: tuple[str, ...] = _NARROW) -> str | None:
    if case.channels > 65535:
        return f"{case.channels} channels; it takes up to 65535"
    return _takes(case, "time_last", dtypes)


def _warp_refuses(case: Case) -> str | None:
    if not 32 <= case.time <= 65536 or case.time & (case.time - 1):
        return f"time is {case.time}; it takes powers of two from 32 to 65536"
    if case.dtype != "float32" and case.time >= 4096:
        return "its results are wrong in 16 bits from 4096 steps on"
    return _contiguous_time(case)


def _triton_kernel(
    module: ModuleType, direction: str, gates: Any, states: Any, grad: Any
) -> Callable[[], Any]:
    """Those of ``scalar`` and ``complex``, which takes pairs of real numbers."""
    grid, time = gates.shape[:2], gates.shape[2]
    if gates.is_complex():
        import torch

        gates, states, grad = map(torch.view_as_real, (gates, states, grad))
    # The backward pass of scalar reads up to one block of 2048 past the last state.
    roomy = states.new_zeros(states.numel() + 2048)
    states = roomy[: states.numel()].view(states.shape).copy_(states)

    def forward() -> Any:
        out = states.new_empty(states.shape)
        module.forward_scan[grid](gates, states, out, seqlen=time, enable_fp_fusion=False)
        return out

    def backward() -> Any:
        tokens_grad, gates_grad = states.new_empty(states.shape), gates.new_empty(gates.shape)
        module.backward_scan[grid](
            gates, states, grad, tokens_grad, gates_grad, seqlen=time, enable_fp_fusion=False
        )
        return gates_grad, tokens_grad

    return forward if direction == "forward" else backward


def _warp_kernel(
    module: ModuleType, direction: str, gates: Any, states: Any, grad: Any
) -> Callable[[], Any]:
    def forward() -> Any:
        out = states.new_empty(states.shape)
        module.warpscan_forward(gates, states, out, False)
        return out

    def backward() -> Any:
        gates_grad, tokens_grad = gates.new_empty(gates.shape), states.new_empty(states.shape)
        module.warpscan_backward(gates, states, grad, gates_grad, tokens_grad)
        return gates_grad, tokens_grad

    return forward if direction == "forward" else backward


SCALAR = Baseline(
    "accelerated-scan scalar", "accelerated-scan", "accelerated_scan.scalar", "scan",
    _triton_kernel, _contiguous_time,
)  # fmt: skip
WARP = Baseline(
    "accelerated-scan warp", "accelerated-scan", "accelerated_scan.warp", "scan",
    _warp_kernel, _warp_refuses,
)  # fmt: skip
COMPLEX = Baseline(
    "accelerated-scan complex", "accelerated-scan", "accelerated_scan.complex", "scan",
    _triton_kernel, lambda case: _contiguous_time(case, ("complex64",)),
)  # fmt: skip

# --- sequential_scan -------------------------------------------------------------------------


def _sequential_cuda_refuses(case: Case) -> str | None:
    widths = (512, 768, 1024, 1536, 2048)
    if case.channels not in widths:
        return f"{case.channels} channels; it takes {', '.join(map(str, widths))}"
    if case.time < 3:
        return f"time is {case.time}; its backward pass takes 3 and more"
    return _takes(case, "channel_last", ("float32", "bfloat16"))


def _sequential_cuda_kernel(
    module: ModuleType, direction: str, gates: Any, states: Any, grad: Any
) -> Callable[[], Any]:
    """In bfloat16 its backward kernel writes the gradient of the tokens over the states."""
    suffix = "" if gates.element_size() == 4 else "_half"
    forward, backward = (
        getattr(module, f"scan_{name}{suffix}") for name in ("forward", "backward")
    )
    if direction == "forward":
        return lambda: forward(gates, states)
    return lambda: backward(gates, states, grad)


def _sequential_triton_refuses(case: Case) -> str | None:
    if case.time < 2:
        return f"time is {case.time}; its backward pass takes 2 and more"
    return _takes(case, "channel_last", ("bfloat16",))


def _sequential_triton_kernel(
    module: ModuleType, direction: str, gates: Any, states: Any, grad: Any
) -> Callable[[], Any]:
    """Its backward kernel writes the gradient of the tokens over the states, too."""
    if direction == "forward":
        return lambda: module.sequential_scan_forward(gates, states)
    return lambda: module.sequential_scan_backward(gates, states, grad)


#: It launches on the default stream.
SEQUENTIAL_CUDA = Baseline(
    "sequential_scan cuda", "sequential_scan", "sequential_scan_cuda", "scan_forward",
    _sequential_cuda_kernel, _sequential_cuda_refuses, captured=False,
)  # fmt: skip
SEQUENTIAL_TRITON = Baseline(
    "sequential_scan triton", "sequential_scan", "sequential_scan.kernels", "sequential_scan_forward",
    _sequential_triton_kernel, _sequential_triton_refuses,
)  # fmt: skip

#: Those whose users call them on (batch, channels, time).
BASELINES = (SCALAR, WARP)
#: Those that have kernels to time.
TIMED = (*BASELINES, COMPLEX, SEQUENTIAL_CUDA, SEQUENTIAL_TRITON)

#: This project, called as its users call it; not one of the baselines.
OURS = Baseline("scan-registry", "scan-registry", NAME, "linear_scan")


def installed() -> list[Baseline]:
    """The timed baselines that are installed here."""
    return [baseline for baseline in TIMED if baseline.version is not None]
