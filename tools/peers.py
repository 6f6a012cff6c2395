"""The peers that the benchmarks compare this project with; ``scan-registry bench`` times them, too."""

from __future__ import annotations

from scan_registry.bench.peers import OURS, PEERS, Peer, installed

__all__ = ["OURS", "PEERS", "Peer", "installed"]
