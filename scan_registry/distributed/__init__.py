"""One sequence over many GPUs: operators whose time dimension is cut between the ranks of a torch.distributed group.

A ``group`` is a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group. ``RuntimeError`` says that there is no
process group, or that another rank refused its arguments; the message names the rank and its error. An argument that is wrong on
one rank is an error on all ranks. With NCCL, a rank whose arguments are as in an earlier call does not wait for the GPU. It raises
the error in the first later call or backward pass that finds the GPU's comparison finished, and the results of the call itself
are not valid.

Importing this package does not import torch. Each name imports what it needs on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.kernels.causal_conv1d.op.distributed import causal_conv1d
    from scan_registry.kernels.gated_scan.op.distributed import gated_scan
    from scan_registry.kernels.linear_scan.op.distributed import linear_scan
    from scan_registry.kernels.linear_scan.op.distributed_summary import scan_summary
    from scan_registry.kernels.selective_scan.op.distributed import selective_scan
    from scan_registry.kernels.ssd_scan.op.distributed import ssd_scan

__all__ = [
    "causal_conv1d",
    "gated_scan",
    "linear_scan",
    "scan_summary",
    "selective_scan",
    "ssd_scan",
]


def _of_families() -> dict[str, str]:
    from scan_registry.kernels import public

    return public("DISTRIBUTED")


__getattr__, __dir__ = lazy.names(globals(), {}, _of_families)
