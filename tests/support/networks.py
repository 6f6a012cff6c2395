"""Every module of the package, made with the fewest arguments; all are called with (batch, time, FEATURES)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from layers import FEATURES, MAKERS
from torch import Tensor

from scan_registry import nn

#: Those with the constructors of torch.nn's, and SLSTM.
RECURRENT: dict[str, Callable[..., Any]] = {
    kind: partial(getattr(nn, kind), FEATURES, FEATURES, batch_first=True)
    for kind in ("LSTM", "GRU", "RNN", "SLSTM")
}
#: By torch's function, or step by step, as there is no kernel.
PROJECTED: dict[str, Callable[..., Any]] = {
    "LSTM projected": partial(nn.LSTM, FEATURES, FEATURES + 1, proj_size=FEATURES, batch_first=True)
}
BOTH_WAYS: dict[str, Callable[..., Any]] = {
    f"{kind} both ways": partial(make, num_layers=2, bidirectional=True)
    for kind, make in (RECURRENT | PROJECTED).items()
}
MAMBA: dict[str, Callable[..., Any]] = {
    "Mamba": partial(nn.Mamba, FEATURES, 4),
    "Mamba2": partial(nn.Mamba2, FEATURES, 4, headdim=4, ngroups=2),
}
MODULES = {**RECURRENT, **PROJECTED, **BOTH_WAYS, **MAKERS, **MAMBA}


def output(result: Any) -> Tensor:
    """A module's output, without the states that may come with it."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def final_state(module: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The output, and what to go on from, of whichever module."""
    if type(module).__name__ in RECURRENT:
        found: tuple[Tensor, Any] = module(x, state)
        return found
    if type(module).__name__ in MAMBA:
        if state is None:
            state = module.allocate_inference_cache(x.shape[0], 0, device=x.device)
        return module(x, states=state), state
    y, last = module(x, initial_state=state, return_final_state=True)
    return y, last
