"""The packages that the benchmarks compare this project with, and how their users call them.

To have them: ``pip install accelerated-scan==0.3.1``. Its ``warp`` also needs a CUDA toolkit and a
C++ compiler, since it compiles when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

#: Gates and tokens, (batch, channels, time) and contiguous, to states.
Scan = Callable[[Any, Any], Any]
#: A module, a direction, gates and two further sequences, to a call of the bare kernel.
Kernel = Callable[[ModuleType, str, Any, Any, Any], Callable[[], Any]]


class Case(Protocol):
    """What a peer is to run; ``bench.Case`` is one."""

    @property
    def layout(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def time(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def sequence(self) -> Any:
        """A new random tensor of the case's shape and dtype, on the GPU."""


@dataclass(frozen=True)
class Peer:
    """One implementation of x[t] = gates[t] * x[t-1] + tokens[t].

    distribution  what to install
    module        what to import; importing it is part of what a cold start costs
    function      the module's function that its users call
    kernel        how to launch the kernels without that function's checks and zero fills
    refuses       case -> None, or why the kernels cannot run it
    """

    name: str
    distribution: str
    module: str
    function: str
    kernel: Kernel | None = None
    refuses: Callable[[Case], str | None] = lambda case: None

    @property
    def version(self) -> str | None:
        """The installed version, or None if it is not installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def load(self) -> Scan:
        """What users call; imports, and for some peers compiles, what it needs."""
        scan: Scan = getattr(importlib.import_module(self.module), self.function)
        return scan

    def kernel_call(self, case: Case, direction: str) -> Callable[[], Callable[[], Any]] | None:
        """A function that makes a call with inputs of its own, or None where there is no kernel.

        The call launches the forward or the backward kernel into newly allocated outputs, which it
        returns.
        """
        kernel = self.kernel
        if kernel is None or self.refuses(case):
            return None
        module = importlib.import_module(self.module)

        def make() -> Callable[[], Any]:
            gates = case.sequence().sigmoid()
            return kernel(module, direction, gates, case.sequence(), case.sequence())

        return make


# --- accelerated-scan ------------------------------------------------------------------------


def _contiguous_time(case: Case) -> str | None:
    if case.layout != "time_last":
        return f"layout is {case.layout}; it takes time_last"
    if case.channels > 65535:
        return f"{case.channels} channels; it takes up to 65535"
    return None


def _warp_refuses(case: Case) -> str | None:
    if not 32 <= case.time <= 65536 or case.time & (case.time - 1):
        return f"time is {case.time}; it takes powers of two from 32 to 65536"
    if case.dtype != "float32" and case.time >= 4096:
        return "its results are wrong in 16 bits from 4096 steps on"
    return _contiguous_time(case)


def _scalar_kernel(
    module: ModuleType, direction: str, gates: Any, states: Any, grad: Any
) -> Callable[[], Any]:
    grid, time = gates.shape[:2], gates.shape[2]
    # Its backward pass reads up to one block of 2048 past the last state.
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


SCALAR = Peer(
    name="accelerated-scan scalar",
    distribution="accelerated-scan",
    module="accelerated_scan.scalar",
    function="scan",
    kernel=_scalar_kernel,
    refuses=_contiguous_time,
)
WARP = Peer(
    name="accelerated-scan warp",
    distribution="accelerated-scan",
    module="accelerated_scan.warp",
    function="scan",
    kernel=_warp_kernel,
    refuses=_warp_refuses,
)
PEERS = (SCALAR, WARP)

#: This project, called as its users call it; not one of the peers.
OURS = Peer("scan-registry", "scan-registry", "scan_registry", "linear_scan")


def installed() -> list[Peer]:
    """The peers that are installed here."""
    return [peer for peer in PEERS if peer.version is not None]
