"""Facts about torch's tensors, for what knows no torch."""

from __future__ import annotations

from torch import Tensor

from scan_registry.base.tensor_facts import TensorFacts


def facts_of(tensor: Tensor) -> TensorFacts:
    """What problems for kernels depend on. Tensors on meta count as aligned, as new ones are."""
    return TensorFacts(
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype).removeprefix("torch."),
        tensor.device.type,
        tensor.data_ptr(),
    )
