"""What ``explain`` says of the call itself, before it says what each kernel gets."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from scan_registry.ops.operator import Operator


def refuse_device(operator: Operator, name: str, kwargs: Mapping[str, Any]) -> None:
    """``TypeError`` for a ``device``, which no operator has: the tensors' own device counts."""
    if "device" in kwargs and "device" not in signature(operator.function).parameters:
        raise TypeError(
            f"explain({name}, …) takes no device: it says what runs on the device of the tensors. For a GPU that need not be in "
            f"this machine there is the command `scan-registry explain {name} --for H100 --dtype … --shape …`"
        )
