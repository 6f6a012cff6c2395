"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators.

As in torch, a network counts its products of matrices only, and a convolution its taps, two operations for each
multiplication and addition. A scan has none, so it counts its multiplications and additions one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.package import NAME

Formula = Callable[..., int]


def costs(tensor: Tensor) -> tuple[int, int]:
    """The operations of a multiplication, and of an addition."""
    return (6, 2) if tensor.is_complex() else (1, 1)


#: By the name of the operator, of all families that are imported.
FORMULAS: dict[str, Formula] = {}


def add(formulas: Mapping[str, Formula]) -> None:
    """Count the operators of a family by these formulas."""
    FORMULAS.update(formulas)
    announce()


def announce() -> None:
    """Tell torch's counter of the formulas if it is there: all that are made from now on, and those that count
    now. To import it takes longer than a first call, so whoever counts has to have done so."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    kind = getattr(module, "_FlopCounterMode", None)
    registries = [module.flop_registry]
    if kind is not None and torch._C._len_torch_dispatch_stack():
        modes: Any = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        registries += [mode.counter.flop_registry for mode in modes if isinstance(mode, kind)]
    for registry in registries:
        for name, formula in FORMULAS.items():
            packet = getattr(getattr(torch.ops, NAME), name, None)
            if packet is not None:
                registry.setdefault(packet, formula)
