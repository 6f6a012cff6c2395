"""One sequence over many GPUs: operators whose time dimension is cut between the ranks of a torch.distributed group.

Importing this package does not import torch. Each name imports what it needs on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.distributed.convolution import causal_conv1d
    from scan_registry.distributed.gated import gated_scan
    from scan_registry.distributed.linear import linear_scan
    from scan_registry.distributed.selective import selective_scan
    from scan_registry.distributed.summary import scan_summary

__all__ = [
    "causal_conv1d",
    "gated_scan",
    "linear_scan",
    "scan_summary",
    "selective_scan",
]

_HOMES: dict[str, str | None] = {
    "causal_conv1d": "scan_registry.distributed.convolution",
    "gated_scan": "scan_registry.distributed.gated",
    "linear_scan": "scan_registry.distributed.linear",
    "selective_scan": "scan_registry.distributed.selective",
    "scan_summary": "scan_registry.distributed.summary",
}

__getattr__, __dir__ = lazy.names(globals(), _HOMES)
