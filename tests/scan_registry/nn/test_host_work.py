"""What the CPU does in a step of a Mamba block on a GPU: it reads no values from the GPU, which a CUDA graph cannot record, and
launches few operators. Fake tensors stand for those of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import nn
from scan_registry.compat import causal_conv1d, flashrnn, mamba_ssm

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BATCH, TIME = 32, 2, 40
#: Operators that wait for the GPU, as their result on the CPU depends on values.
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}
#: Operators that launch nothing.
VIEWS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
BLOCKS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: nn.Mamba(WIDTH, device="meta"),
    "mamba2": lambda: nn.Mamba2(WIDTH, headdim=16, device="meta"),
}


class Watch(TorchDispatchMode):
    """Counts launches, and refuses what a CUDA graph cannot record: reads of values, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name} reads values"
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            tensors = [t for t in args if isinstance(t, Tensor) and t.dim()]
            assert {t.device for t in tensors} <= {result.device}, f"{name} copies between devices"
        self.launches[name] += name not in VIEWS
        return result


def training_step(block: Any) -> Counter[str]:
    x = torch.randn(BATCH, TIME, WIDTH, device="meta", requires_grad=True)
    y_grad = torch.randn(BATCH, TIME, WIDTH, device="meta")
    with Watch() as watch:
        block(x).backward(y_grad)
    assert all(parameter.grad is not None for parameter in block.parameters())
    return +watch.launches


#: Launches of a training step. Mamba: 12 matrix products, two passes of two kernels, both derivatives of views of several outputs,
#: a sum of two gradients, and four for -exp(A_log). torch computes the norm of Mamba-2 in several outside of a GPU.
MOST = {"mamba": 23, "mamba2": 41}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_training_step_reads_no_values_and_launches_little(name: str) -> None:
    launches = training_step(BLOCKS[name]())
    assert launches.total() <= MOST[name], launches
    assert not {"clone", "_to_copy", "copy_", "contiguous"} & {*launches}, "a copy"


@pytest.mark.parametrize("name", BLOCKS)
def test_generation_reads_no_values(name: str) -> None:
    with torch.no_grad():
        block = BLOCKS[name]()
        states = block.allocate_inference_cache(BATCH, 0)
        token = torch.randn(BATCH, 1, WIDTH, device="meta")
        with Watch() as watch:
            block(token, states=states)
            block.step(token, *states)
    assert watch.launches["selective_state_update"] == 2


def test_a_read_of_values_is_refused() -> None:
    with Watch(), pytest.raises(AssertionError, match="reads values"):
        bool(torch.ones((), device="meta"))


def test_a_copy_to_another_device_is_refused() -> None:
    with Watch(), pytest.raises(AssertionError, match="copies between devices"):
        torch.ones(3).to("meta")


# --- The stand-ins ----------------------------------------------------------------------------


def drawn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device="meta", requires_grad=grad)


def of_selective_scan() -> Tensor:
    u, delta, z = (drawn(BATCH, TIME, WIDTH).mT for _ in range(3))
    B, C = (drawn(BATCH, TIME, 4).mT for _ in range(2))
    D, bias = drawn(WIDTH), drawn(WIDTH)
    scan: Any = mamba_ssm.selective_scan_fn
    out: Tensor = scan(u, delta, drawn(WIDTH, 4), B, C, D, z, bias, delta_softplus=True)
    return out


def of_inner() -> Tensor:
    weights = drawn(8, WIDTH), drawn(WIDTH, 2), drawn(6, WIDTH), None, drawn(WIDTH, 3)
    xz, conv = drawn(BATCH, TIME, 2 * WIDTH).mT, (drawn(WIDTH, 1, 4), drawn(WIDTH))
    return mamba_ssm.mamba_inner_fn(xz, *conv, *weights, D=drawn(WIDTH), delta_bias=drawn(WIDTH))


def of_chunk_scan() -> Tensor:
    x, (B, C) = drawn(BATCH, TIME, 4, 8), (drawn(BATCH, TIME, 1, 4) for _ in range(2))
    combined: Any = mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined
    dt, A, D, bias = drawn(BATCH, TIME, 4), drawn(4), drawn(4), drawn(4)
    out: Tensor = combined(x, dt, A, B, C, 16, D=D, dt_bias=bias, dt_softplus=True)
    return out


def of_convolution() -> Any:
    conv = drawn(WIDTH, 4), drawn(WIDTH)
    return causal_conv1d.causal_conv1d_fn(drawn(BATCH, TIME, WIDTH).mT, *conv, activation="silu")


@pytest.mark.parametrize("function", [of_selective_scan, of_inner, of_chunk_scan, of_convolution])
def test_stand_ins_read_no_values(function: Callable[[], Tensor]) -> None:
    with Watch() as watch:
        y = function()
        y.backward(torch.ones_like(y))
    assert any("backward" in name for name in watch.launches)


def test_steps_of_stand_ins_read_no_values() -> None:
    x, states = drawn(BATCH, WIDTH), drawn(BATCH, WIDTH, 4, grad=False)
    update: Any = mamba_ssm.ops.triton.selective_state_update.selective_state_update
    B, C = drawn(BATCH, 4), drawn(BATCH, 4)
    with Watch() as watch:
        causal_conv1d.causal_conv1d_update(x, states, drawn(WIDTH, 4), drawn(WIDTH), "silu")
        update(states, x, drawn(BATCH, WIDTH), drawn(WIDTH, 4), B, C, dt_softplus=True)
    assert {"causal_conv1d_update", "selective_state_update"} <= {*watch.launches}


def test_initial_values_of_flashrnn_are_not_copied_from_the_cpu() -> None:
    config = flashrnn.FlashRNNConfig(function="lstm", initial_val=[0.5, 0.25], dtype="float32")
    Wx, R, b = drawn(BATCH, TIME, 4, 2, 8), drawn(4, 2, 8, 8), drawn(4, 2, 8)
    with Watch() as watch:
        flashrnn.flashrnn(Wx, R, b, function="lstm", config=config)
    assert watch.launches["new_full"]
