"""What is timed of single steps of a selective scan: cases, their bytes, and the package mamba-ssm beside them."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import ITEM_SIZE
from scan_registry.kernels.selective_state_update.problem import DTYPES, MOST_STATES
from scan_registry.ops import benchmark

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Of what sizes are given.
KINDS = {
    "channels": ("batch", "channels", "states"),
    "heads": ("batch", "heads", "channels", "states"),
}
PASS = "step"
_INPUTS = "bfloat16"
_BATCHES = (1, 16, 64, 256)
#: Those of Mamba's and Mamba-2's blocks, for one token of each sequence and for four.
USUAL = tuple(
    f"{kind}:{batch},{sizes}:{dtype}{tokens}"
    for kind, sizes in (("channels", "8192,16"), ("heads", "128,64,128"))
    for dtype in ("float32", "bfloat16")
    for tokens, batches in (("", _BATCHES), (":tokens=4", _BATCHES[2:]))
    for batch in batches
)
ON_CPU = ("channels:4,256,16:float32",)


@dataclass(frozen=True)
class Case(benchmark.ParsedCase):
    """A step to time: ``channels:64,5120,16:float32`` or ``heads:64,64,64,128:float32``; batch, heads, channels of each
    and states, and the dtype of the state. Heads have one A, step size, bias and D each, as in Mamba-2. All but the
    state, A, D and the bias are bfloat16, or what ``inputs`` says. A sequence has so many ``tokens``."""

    family: ClassVar[str] = "selective_state_update"
    expected: ClassVar[str] = (
        "kind:sizes:dtype, and perhaps :inputs=DTYPE or :tokens=N, where sizes of channels are batch,channels,states, "
        f"of heads batch,heads,channels,states, states at most {MOST_STATES}, and dtypes {', '.join(DTYPES)}"
    )
    time: ClassVar[int] = 1

    kind: str
    shape: tuple[int, ...]
    dtype: str
    inputs: str = _INPUTS
    tokens: int = 1

    @classmethod
    def of(cls, parts: benchmark.CaseText) -> Case | None:
        kind, shape, dtype, options = parts
        inputs, tokens = options.pop("inputs", _INPUTS), int(options.pop("tokens", "1"))
        fits = len(shape) == len(KINDS.get(kind, ())) and min(*shape, tokens) > 0
        if not fits or shape[-1] > MOST_STATES or {dtype, inputs} - {*DTYPES}:
            return None
        return cls(kind, shape, dtype, inputs, tokens)

    @property
    def text(self) -> benchmark.CaseText:
        options = self.unlike(inputs=_INPUTS, tokens=1)
        return benchmark.CaseText(self.kind, self.shape, self.dtype, options)

    @property
    def group(self) -> str:
        return ", ".join(filter(None, [self.kind, self.sizes, self.options]))

    @property
    def cells(self) -> tuple[str, ...]:
        return self.kind, ", ".join(filter(None, [self.sizes, self.options])), self.dtype

    def moves(self, direction: str) -> tuple[int, int]:
        """As a copy does: nearly all is the state, there and back."""
        return 1, 1

    def traffic(self, direction: str) -> int:
        """The state, there and back; of each token x, z, the output, dt, B and C; and A, D and the bias once."""
        batch, *channels, states = self.shape
        rows, of_head = (
            prod(channels),
            channels[0],
        )  # without heads, each channel has numbers of its own
        of_token = 3 * rows + of_head + 2 * states
        of_A = of_head if self.kind == "heads" else rows * states
        return (
            2 * prod(self.shape) * ITEM_SIZE[self.dtype]
            + batch * self.tokens * of_token * ITEM_SIZE[self.inputs]
            + (of_A + 2 * of_head) * ITEM_SIZE["float32"]
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    def tensors(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """New random ones: all arguments up to ``dt_bias``."""
        import torch

        batch, *channels, states = self.shape
        batch *= self.tokens
        inputs = getattr(torch, self.inputs)

        def drawn(*shape: int, dtype: torch.dtype = inputs) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        of_row, wide = (batch, *channels), torch.float32
        dt, decay = drawn(*of_row), -torch.rand(*channels, states, device=device) - 0.1
        skip, bias = drawn(*channels, dtype=wide), drawn(*channels, dtype=wide)
        if self.kind == "heads":
            dt, skip, bias = (t[..., :1].expand(t.shape) for t in (dt, skip, bias))
            decay = decay[:, :1, :1].expand(decay.shape)
        state = drawn(*self.shape, dtype=getattr(torch, self.dtype))
        through = (
            (drawn(batch, 1, states) for _ in "BC")
            if len(channels) == 2
            else (drawn(batch, states) for _ in "BC")
        )
        return state, drawn(*of_row), dt, decay, *through, skip, drawn(*of_row), bias

    def cu_seqlens(self, device: torch.device | str) -> Tensor | None:
        """The bounds of sequences that have several tokens."""
        import torch

        if self.tokens == 1:
            return None
        bounds = torch.arange(self.shape[0] + 1, dtype=torch.int32, device=device)
        return bounds * self.tokens


class MambaSSM(benchmark.Implementation):
    """The function of that package, as its users call it."""

    name: ClassVar[str] = "mamba-ssm"

    def refusal(self, case: Case) -> str | None:
        return None if case.tokens == 1 else "it takes one token of each sequence"

    def new_call(self, case: Case, direction: str, device: torch.device) -> benchmark.Call:
        module: Any = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
        tensors = case.tensors(device)
        return lambda: module.selective_state_update(*tensors, dt_softplus=True)


class StepBenchmark(benchmark.Benchmark):
    """Steps of Mamba and Mamba-2, of one token or of several, in place of the states."""

    case_type, usual, packages = Case, (USUAL, ON_CPU), (MambaSSM(),)
    subject = "steps of selective scans"
    description = (
        "Times one step of a selective scan, or one for each of a few tokens, in place of its state, with D, z, a bias and "
        "softplus, and the package mamba-ssm beside one step where that is installed. Inputs are bfloat16."
    )
    case_help = (
        "channels:batch,channels,states:dtype or heads:batch,heads,channels,states:dtype, where the dtype is that of "
        "the state, and to which :inputs=DTYPE and :tokens=N may be added; may repeat. Default: sizes of Mamba's blocks"
    )
    columns = ("kind", "sizes~", "dtype")
    passes = (PASS,)

    def call(
        self, case: Case, direction: str, backend: Backend, device: torch.device
    ) -> benchmark.Call:
        from scan_registry.kernels.selective_state_update.op.function import selective_state_update

        state, x, dt, A, B, C, D, z, bias = case.tensors(device)
        bounds = case.cu_seqlens(device)
        return lambda: selective_state_update(
            *(state, x, dt, A, B, C, D, z, bias, True), cu_seqlens=bounds, backend=backend
        )


BENCHMARK = StepBenchmark()
