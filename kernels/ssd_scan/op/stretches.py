"""A forward pass of few heads, whose CTAs alone would leave SMs without work: time is cut into stretches that run at the same time.

Kernels take the stretches as sequences that are packed along time. The states kernel computes the state after each stretch but the
last one from zeros, and the stretch's decay; these are handed on from stretch to stretch; and the forward kernel starts each
stretch from the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.frozen import dataclass
from scan_registry.kernels.ssd_scan.problem import CHUNK
from scan_registry.ops.launching import Run


@dataclass(frozen=True)
class Stretches:
    """count    of stretches, each of which has a step at least
    length  of each but the last one, in steps
    time    steps of all
    """

    count: int
    length: int
    time: int

    @staticmethod
    def of(time: int, count: int) -> Stretches:
        """At most so many, of whole chunks but for the last one."""
        length = -(-time // (count * CHUNK)) * CHUNK
        return Stretches(-(-time // length), length, time)

    def run(
        self, states: Run, forward: Run, pointers: Mapping[str, Any], state: tuple[int, ...]
    ) -> Tensor:
        """The final state, of shape ``state``, in memory with others; outputs are in ``pointers``."""
        batch, heads = state[:2]
        device = pointers["x"].device
        bounds = torch.arange(
            0, (self.count + 1) * self.length, self.length, dtype=torch.int32, device=device
        ).clamp_(max=self.time)
        new = {"dtype": torch.float32, "device": device}
        ends, before = (
            torch.empty((batch, n, *state[1:]), **new) for n in (self.count - 1, self.count)
        )
        decays = torch.empty((batch, self.count - 1, heads), **new)
        written = {"initial_state": None, "final_state": ends, "sequence_decays": decays}
        states({**pointers, "cu_seqlens": bounds[:-1], **written})
        initial = pointers["initial_state"]
        if initial is None:
            before[:, 0].zero_()
        else:
            before[:, 0].copy_(initial.detach())
        entering = before.unbind(1)
        gates = decays[..., None, None].unbind(1)
        for addition, gate, own, following in zip(
            ends.unbind(1), gates, entering[:-1], entering[1:], strict=True
        ):
            torch.addcmul(addition, gate, own, out=following)
        after = torch.empty_like(before)
        forward({**pointers, "cu_seqlens": bounds, "initial_state": before, "final_state": after})
        return after[:, -1]
