"""Stands in for ``flashrnn``: its function and its configuration, on the kernels of ``rnn``.

Backends are called as there. ``cuda_fused`` takes all steps in one launch, and goes step by step where
heads are too wide for that; ``cuda`` always goes step by step; ``triton_fused`` and ``triton`` are
Triton's kernels; ``vanilla`` and ``vanilla_fwbw`` are plain torch. With CPU tensors every backend runs
what ``rnn`` runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn.op.function import rnn
from scan_registry.kernels.rnn.problem import SIZES, RnnBackend
from scan_registry.ops.checks import check_dense, described

BACKENDS: dict[str, RnnBackend] = {
    "cuda_fused": "cuda",
    "cuda": "cuda_alternating",
    "triton_fused": "triton",
    "triton": "triton",
    "vanilla": "reference",
    "vanilla_fwbw": "reference",
}
#: Dimensions: B batch, T time, G gates, H heads, D units, P units before the step, S states.
SHAPES = {
    "input_shape": "BTGHD",
    "output_shape": "SBTHD",
    "recurrent_shape": "GHDP",
    "bias_shape": "GHD",
}
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_PER_TENSOR = ("dtype_b", "dtype_r", "dtype_w", "dtype_g", "dtype_s", "dtype_a")


def _torch_dtype(name: str | None) -> torch.dtype:
    dtype: torch.dtype = DTYPES[name or ""]
    return dtype


def _torch_dtype_of(field_name: str) -> Any:
    """A property: torch's dtype of what a field has in words."""
    return property(lambda self: _torch_dtype(getattr(self, field_name)))


@dataclass
class FlashRNNConfig:
    """As ``flashrnn.FlashRNNConfig``; what it said and did otherwise:

    - ``forward_clipval`` clips h, and ``gradient_recurrent_clipval`` the gradient that passes R, at
      every step and on every backend; there, the first one was given the second one's value.
    - ``dtype`` is what kernels take, and what products with R are rounded to; sums and the states that
      are carried are always float32 or wider, whatever ``dtype_acc`` and ``dtype_a`` are. Tensors are
      converted to the dtypes of their own first, and the states that come out are of ``dtype_s``;
      ``dtype_g`` makes no difference. With ``enable_automatic_mixed_precision=False`` tensors must
      have these dtypes already.
    - Layouts are any order of the dimensions that are named, and are not copied for.
    - ``initial_val`` holds for every function. No function has ``constants``.
    - ``batch_size``, ``trainable_r``, ``trainable_b`` and ``num_gates_*`` are kept, and change nothing;
      ``hidden_dim``, ``num_heads`` and ``head_dim`` are checked against the tensors where they are
      given.

    Raises:
        ValueError: an option has a value that is not accepted; the message lists those that are.
    """

    backend: str = "cuda_fused"
    function: str = "lstm"
    gradient_recurrent_cut: bool = False
    gradient_recurrent_clipval: float | None = None
    forward_clipval: float | None = None
    constants: dict[str, float] | None = None
    simple_agg: bool = True
    hidden_dim: int = -1
    num_heads: int = -1
    head_dim: int = -1
    num_states: int = field(default=-1)
    num_gates_r: int = -1
    num_gates_w: int = -1
    num_gates_i: int = -1
    num_gates_t: int = -1
    batch_size: int = 8
    input_shape: str = SHAPES["input_shape"]
    output_shape: str = SHAPES["output_shape"]
    recurrent_shape: str = SHAPES["recurrent_shape"]
    bias_shape: str = SHAPES["bias_shape"]
    dtype: str = "bfloat16"
    dtype_acc: str | None = "float32"
    dtype_b: str | None = None
    dtype_r: str | None = None
    dtype_w: str | None = None
    dtype_g: str | None = None
    dtype_s: str | None = None
    dtype_a: str | None = None
    enable_automatic_mixed_precision: bool = True
    trainable_r: list[bool] | bool = True
    trainable_b: list[bool] | bool = True
    initial_val: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        for name, accepted in (("backend", BACKENDS), ("function", SIZES), ("dtype", DTYPES)):
            _known(name, getattr(self, name), [*accepted])
        self.dtype_b = self.dtype_b or self.dtype
        self.dtype_r = self.dtype_r or self.dtype
        self.dtype_w = self.dtype_w or self.dtype
        self.dtype_s = self.dtype_s or self.dtype_w
        self.dtype_g = self.dtype_g or self.dtype_r
        self.dtype_a = self.dtype_a or self.dtype_b
        for name in _PER_TENSOR:
            _known(name, getattr(self, name), [*DTYPES])
        for name, letters in SHAPES.items():
            if sorted(getattr(self, name)) != sorted(letters):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; accepted are the letters {letters}, each "
                    "once, in any order"
                )
        if self.constants:
            raise ValueError(f"constants are {self.constants}; {self.function} has none")
        self.constants = {}
        sizes = SIZES[self.function]  # type: ignore[index]
        self.simple_agg = self.function != "gru"
        self.num_states = len(sizes.states)
        self.num_gates_r, self.num_gates_w = sizes.recurrent, sizes.inputs
        self.num_gates_i = self.num_gates_t = sizes.bias
        self._complete()

    def _complete(self) -> None:
        """Of hidden_dim = num_heads · head_dim, what follows from the others."""
        if self.num_heads <= 0 and self.head_dim <= 0:
            self.num_heads = 1 if self.hidden_dim > 0 else -1
        if self.hidden_dim > 0 and self.num_heads > 0 and self.head_dim <= 0:
            self.head_dim = self.hidden_dim // self.num_heads
        elif self.hidden_dim > 0 and self.head_dim > 0 and self.num_heads <= 0:
            self.num_heads = self.hidden_dim // self.head_dim
        elif self.hidden_dim <= 0 and min(self.num_heads, self.head_dim) > 0:
            self.hidden_dim = self.num_heads * self.head_dim
        sizes = self.hidden_dim, self.num_heads, self.head_dim
        if min(sizes) > 0 and self.hidden_dim != self.num_heads * self.head_dim:
            raise ValueError(
                f"hidden_dim is {sizes[0]}, num_heads {sizes[1]} and head_dim {sizes[2]}; the first "
                "must be the others' product"
            )

    @property
    def input_dim(self) -> int:
        return self.num_gates_w * self.hidden_dim

    torch_dtype = _torch_dtype_of("dtype")
    torch_dtype_b = _torch_dtype_of("dtype_b")
    torch_dtype_r = _torch_dtype_of("dtype_r")
    torch_dtype_w = _torch_dtype_of("dtype_w")
    torch_dtype_s = _torch_dtype_of("dtype_s")


def flashrnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor,
    states: Tensor | None = None,
    function: str = "lstm",
    config: FlashRNNConfig | None = None,
    backend: str = "cuda_fused",
    dtype: str = "bfloat16",
) -> tuple[Tensor, Tensor]:
    """The states of a recurrent network after each step, and after the last one.

    As ``flashrnn.flashrnn``, except that

    - nothing is compiled; any batch, number of heads and T, and every D from 1 up;
    - every function has a fused kernel, GRU too, and second derivatives are right;
    - initial states have gradients on every backend, and so has every state of the results;
    - any strides, and CPU tensors, too. A state n of sLSTM that is 0 is taken to be one before the
      first step by itself; there, all of them have to be.

    Args:
        Wx: (B, T, gates, heads, D), or ``config.input_shape``.
        R: (gates, heads, D, D), or ``config.recurrent_shape``.
        b: (gates, heads, D), or ``config.bias_shape``.
        states: (S, B, 1, heads, D), or ``config.output_shape``; ``config.initial_val`` if None.
        function: ``"lstm"``, ``"slstm"``, ``"gru"`` or ``"elman"``.
        config: replaces ``function``, ``backend`` and ``dtype``.
        backend: see the module.
        dtype: what kernels take; the results are of the dtype of ``Wx``.

    Returns:
        (S, B, T, heads, D) and (S, B, 1, heads, D), or ``config.output_shape``, in ``config.dtype_s``.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: the backend has no kernel that runs on this GPU.
    """
    tensors = (
        {"Wx": Wx, "R": R, "b": b}
        if states is None
        else {"Wx": Wx, "R": R, "b": b, "states": states}
    )
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted are {', '.join(DTYPES)}")
    if config is not None and not isinstance(config, FlashRNNConfig):
        raise TypeError(f"config must be a FlashRNNConfig, not {type(config).__name__}")
    if config is None:
        own = [str(tensor.dtype).removeprefix("torch.") for tensor in (Wx, R, b)]
        config = FlashRNNConfig(
            backend, function, dtype=dtype, dtype_w=own[0], dtype_r=own[1], dtype_b=own[2]
        )
    inputs = _arranged("Wx", Wx, config, "input_shape", config.dtype_w)
    recurrent = _arranged("R", R, config, "recurrent_shape", config.dtype_r)
    bias = _arranged("b", b, config, "bias_shape", config.dtype_b)
    if states is None:
        initial_state = _initial(inputs, config)
    else:
        initial_state = _arranged("states", states, config, "output_shape", config.dtype_s)
    _check_sizes(inputs, config)
    every, final_state = rnn(
        inputs,
        recurrent,
        bias,
        initial_state,
        function=config.function,  # type: ignore[arg-type]
        backend=BACKENDS[config.backend] if Wx.is_cuda else "auto",
        gradient_recurrent_cut=config.gradient_recurrent_cut,
        gradient_recurrent_clipval=config.gradient_recurrent_clipval,
        forward_clipval=config.forward_clipval,
    )
    order = [SHAPES["output_shape"].index(letter) for letter in config.output_shape]
    every, final_state = (t.to(config.torch_dtype_s).permute(order) for t in (every, final_state))
    return every, final_state


def _known(name: str, value: Any, accepted: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in accepted:
        word = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
        instead = f", so pass {name}={word!r}" if word in accepted else ""
        raise ValueError(
            f"{name} is {described(value)}; accepted are {', '.join(accepted)}{instead}"
        )


def _arranged(
    name: str, tensor: Tensor, config: FlashRNNConfig, shape: str, dtype: str | None
) -> Tensor:
    """The tensor with its dimensions in the order of ``rnn``, by way of its own dtype in the kernels'."""
    letters, wanted = getattr(config, shape), SHAPES[shape]
    if tensor.dim() != len(wanted):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {', '.join(letters)}")
    own = _torch_dtype(dtype)
    if not config.enable_automatic_mixed_precision and tensor.dtype != own:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; without automatic mixed precision it must be {own}"
        )
    ordered = tensor.permute([letters.index(letter) for letter in wanted])
    return ordered.to(own).to(config.torch_dtype)


def _initial(inputs: Tensor, config: FlashRNNConfig) -> Tensor | None:
    """What ``initial_val`` says, for each state or for all of them."""
    initial = config.initial_val
    values = [*initial] if isinstance(initial, Sequence) else [initial] * config.num_states
    if len(values) != config.num_states:
        raise ValueError(
            f"initial_val has {len(values)} values; {config.function} has {config.num_states} states"
        )
    if not any(values):
        return None
    batch, _, _, heads, dim = inputs.shape
    # Each filled on the device: a copy from the CPU would wait for it, and no CUDA graph could record it.
    of_states = torch.stack([inputs.new_full((1, 1, 1, 1), value) for value in values])
    return of_states.expand(-1, batch, 1, heads, dim)


def _check_sizes(inputs: Tensor, config: FlashRNNConfig) -> None:
    for name, size in (("num_heads", inputs.shape[3]), ("head_dim", inputs.shape[4])):
        if getattr(config, name) not in (-1, size):
            raise ValueError(f"{name} is {getattr(config, name)} in the config, and {size} in Wx")
