"""One sequence over many GPUs: operators whose time dimension is cut between the ranks of a torch.distributed group.

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

__all__ = [
    "causal_conv1d",
    "gated_scan",
    "linear_scan",
    "scan_summary",
    "selective_scan",
]


def _of_families() -> dict[str, str]:
    from scan_registry.kernels import public

    return public("DISTRIBUTED")


__getattr__, __dir__ = lazy.names(globals(), {}, _of_families)
