"""What the gated_scan family is made of: a scan whose gates and tokens follow from what networks compute.

``kinds.py`` lists the kinds of gates, each with a header for the kernels; ``problem.py`` has the tensors, ``variants.py``
what all kernels share, ``channel_last.py`` and ``time_last.py`` the kernels of each layout.
"""

from __future__ import annotations

from pathlib import Path

from scan_registry.kernels.gated_scan import channel_last, time_last
from scan_registry.kernels.gated_scan.samples import samples
from scan_registry.kernels.gated_scan.variants import FAMILY_NAME, parameters
from scan_registry.kernels.model import Family

__all__ = ["FAMILY", "parameters"]

FAMILY = Family(
    name=FAMILY_NAME,
    summary="h[t] = gate[t] * h[t-1] + token[t], with gates and tokens computed on the way",
    folder=Path(__file__).parent,
    kernels=(*time_last.kernels(), *channel_last.kernels()),
    samples=samples(),
    on_cpu=True,
    stand_in="gates and tokens by torch's operators, then linear_scan",
)
