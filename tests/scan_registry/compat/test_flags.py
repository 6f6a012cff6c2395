"""Stand-ins refuse what is no flag, and name their own arguments; 0 and 1 are flags, as the replaced functions take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from scan_registry.compat.accelerated_scan import ref, warp
from scan_registry.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_varlen_states
from scan_registry.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from scan_registry.compat.mamba_ssm.ops.triton.selective_state_update import (
    selective_state_update,
)
from scan_registry.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

PAIR = torch.rand(2, 3, 8), torch.rand(2, 3, 8)
CONV = torch.rand(2, 3, 8), torch.rand(3, 4)
SCAN = (
    torch.rand(2, 3, 8),
    torch.rand(2, 3, 8),
    -torch.rand(3, 4),
    torch.rand(3, 4),
    torch.rand(3, 4),
)
#: x, dt, A, B, C, chunk_size.
SSD: Any = (
    *(torch.rand(2, 8, 4, 3), torch.rand(2, 8, 4), -torch.rand(4)),
    *(torch.rand(2, 8, 2, 5), torch.rand(2, 8, 2, 5), 8),
)


def update(**flag: Any) -> Any:
    x, rows = torch.ones(2, 3), torch.ones(2, 4)
    return selective_state_update(torch.ones(2, 3, 4), x, x, -torch.ones(3, 4), rows, rows, **flag)


#: By name a flag, and a function that takes it.
FLAGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "warp.scan_forward": ("reverse", partial(warp.scan_forward, *PAIR)),
    "ref.scan": ("reverse", partial(ref.scan, *PAIR)),
    "ref.scan of an operator": ("reverse", partial(ref.scan, *PAIR, add=torch.maximum)),
    "causal_conv1d_fn": ("return_final_states", partial(causal_conv1d_fn, *CONV)),
    "selective_scan_fn": ("delta_softplus", partial(selective_scan_fn, *SCAN)),
    "selective_scan_fn, state": ("return_last_state", partial(selective_scan_fn, *SCAN)),
    "selective_state_update": ("dt_softplus", update),
    "ssd": ("dt_softplus", partial(mamba_chunk_scan_combined, *SSD)),
    "ssd, state": ("return_final_states", partial(mamba_chunk_scan_combined, *SSD)),
}


@pytest.mark.parametrize("wrong", ["no", 2, None, [True]], ids=repr)
@pytest.mark.parametrize("function", FLAGS)
def test_what_is_no_flag_is_refused(function: str, wrong: Any) -> None:
    name, call = FLAGS[function]
    with pytest.raises(TypeError, match=f"{name} is .*; it must be a bool"):
        call(**{name: wrong})


@pytest.mark.parametrize("function", FLAGS)
def test_0_and_1_are_flags(function: str) -> None:
    name, call = FLAGS[function]
    for number in (0, 1):
        torch.testing.assert_close(call(**{name: number}), call(**{name: bool(number)}))


ZEROS = torch.zeros
OTHERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype of final_states_out": (
        lambda: causal_conv1d_fn(
            *CONV, return_final_states=True, final_states_out=ZEROS(2, 3, 3).double()
        ),
        TypeError,
        "final_states_out has dtype torch.float64, x torch.float32",
    ),
    "device of final_states_out": (
        lambda: causal_conv1d_fn(
            *CONV, return_final_states=True, final_states_out=ZEROS(2, 3, 3, device="meta")
        ),
        ValueError,
        "final_states_out is on meta, x on cpu",
    ),
    "size of the convolution's initial_states": (
        lambda: causal_conv1d_fn(*CONV, initial_states=ZEROS(2, 3, 2)),
        ValueError,
        r"initial_states has shape \(2, 3, 2\); it must be .*, here \(2, 3, 3\)",
    ),
    "dtype of the convolution's initial_states": (
        lambda: causal_conv1d_fn(*CONV, initial_states=ZEROS(2, 3, 3).int()),
        TypeError,
        "initial_states has dtype torch.int32; accepted are float32",
    ),
    "size of the scan's initial_states": (
        lambda: mamba_chunk_scan_combined(*SSD, initial_states=ZEROS(2, 4, 3, 4)),
        ValueError,
        r"initial_states has shape \(2, 4, 3, 4\); it must be .*, here \(2, 4, 3, 5\)",
    ),
    **{
        f"state_len={wrong!r}": (
            lambda wrong=wrong: causal_conv1d_varlen_states(  # type: ignore[misc]
                ZEROS(8, 3), torch.tensor([0, 8]), wrong
            ),
            TypeError,
            f"state_len is {wrong!r}; it must be an int",
        )
        for wrong in (True, 3.0, "3")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_wrong_arguments_are_refused(name: str) -> None:
    call, error, words = OTHERS[name]
    with pytest.raises(error, match=words):
        call()
