"""Draw calls of linear_scan at random, with gradients, and compare them with float64.

    python tests/stress/random_calls.py [--seconds 30] [--seed 0] [--device cpu]
    python tests/stress/random_calls.py --case 1234

Sizes lie at the edges of tiles more often than elsewhere; tensors are transposed, sliced and broadcast, start at any address, and have
NaN around them. Sequences are packed, many of them empty. Each gradient is wanted or not. A call is made twice, with the same
results to the bit, and leaves its inputs as they were. Each call has a number, which `--case` repeats. The exit status is 1 after
a wrong result, a difference or an error.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from scan_registry import linear_scan

#: Twice the rounding error of a dtype, and what else a sum of products may be off, by the largest result.
EPS = {
    torch.float32: 4e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.float64: 4e-14,
    torch.complex64: 8e-6,
}
OFF = {2: 2e-4, 4: 2e-5, 8: 2e-5}
CHANNELS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 21, 31, 32, 33, 42, 64, 65, 100, 257)
#: The largest number of float16, less what sums of rounded gradients need.
MOST = 3e4


def widened(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@dataclass
class Call:
    """What a call is made of. ``wanted``: the gradients of gates, tokens and the initial state."""

    gates: Tensor
    tokens: Tensor
    initial: Tensor | None
    dim: int
    reverse: bool
    bounds: Tensor | None
    wanted: tuple[bool, bool, bool]
    states_grad: Tensor
    final_grad: Tensor
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        places = [
            f"{name} {tuple(t.shape)} {t.stride()} {t.dtype} at {t.data_ptr() % 16}"
            for name, t in (("gates", self.gates), ("tokens", self.tokens))
        ]
        bounds = None if self.bounds is None else self.bounds.tolist()[:12]
        state = None if self.initial is None else tuple(self.initial.shape)
        return f"{places} dim={self.dim} reverse={self.reverse} bounds={bounds} initial={state} wanted={self.wanted}"

    def run(self) -> list[Tensor | None]:
        """States, final states and gradients."""
        inputs = [
            None if t is None else t.detach() for t in (self.gates, self.tokens, self.initial)
        ]
        for tensor, wanted in zip(inputs, self.wanted, strict=True):
            if tensor is not None and wanted:
                tensor.requires_grad_()
        how = {"dim": self.dim, "reverse": self.reverse, "cu_seqlens": self.bounds}
        results = linear_scan(*inputs, return_final_state=True, **how)  # type: ignore[arg-type]
        if results[0].requires_grad:
            torch.autograd.backward(results, (self.states_grad, self.final_grad))
        grads = [None if t is None else t.grad for t in inputs]
        return [results[0].detach(), results[1].detach(), *grads]

    def expected(self) -> list[Tensor]:
        """The same in float64, the gradients of broadcast tensors as terms of their sums."""
        full, dim = self.tokens.shape, self.dim
        size = full[dim]
        gates, tokens, grad = (
            widened(t).expand(full).movedim(dim, -1)
            for t in (self.gates, self.tokens, self.states_grad)
        )
        last = self.final_grad if self.bounds is not None else self.final_grad.unsqueeze(dim)
        final_grad = widened(last).movedim(dim, -1)
        initial = torch.zeros_like(final_grad)
        if self.initial is not None:
            entering = self.initial if self.bounds is not None else self.initial.unsqueeze(dim)
            initial = widened(entering).expand(last.shape).movedim(dim, -1)
        ends = (
            torch.tensor([0, size], device=tokens.device)
            if self.bounds is None
            else self.bounds.long()
        )
        has_steps = ends.diff() > 0
        first, end = ends[:-1][has_steps], ends[1:][has_steps] - 1
        if self.reverse:
            first, end = end, first
        by = -1 if self.reverse else 1

        scale, shift = gates.clone(), tokens.clone()
        shift[..., first] += scale[..., first] * initial[..., has_steps]
        scale[..., first] = 0
        states = solved(scale, shift, self.reverse)
        final = initial.clone()
        final[..., has_steps] = states[..., end]

        before = widened(states.to(self.tokens.dtype)).roll(by, -1)
        before[..., first] = initial[..., has_steps]
        back = gates.conj().resolve_conj().roll(-by, -1)
        back[..., end] = 0
        grad = grad.clone()
        grad[..., end] += final_grad[..., has_steps]
        adjoint = solved(back, grad, not self.reverse)
        initial_grad = final_grad.clone()
        initial_grad[..., has_steps] = gates[..., first].conj() * adjoint[..., first]
        results = states, final, adjoint * before.conj(), adjoint, initial_grad
        shaped = [t.movedim(-1, dim) for t in results]
        if self.bounds is None:
            shaped[1], shaped[4] = (shaped[n].squeeze(dim) for n in (1, 4))
        return shaped

    def check(self) -> list[str]:
        """What is wrong with the call."""
        kept = [t.clone() for t in (self.gates, self.tokens)]
        out, again = self.run(), self.run()
        if not all(map(torch.equal, kept, (self.gates, self.tokens))):
            self.problems.append("an input has changed")
        if self.tokens.numel() == 0:
            return self.problems
        names = "states", "final state", "gates", "tokens", "initial state"
        is_there = True, True, *self.wanted[:2], self.wanted[2] and self.initial is not None
        every = zip(names, is_there, out, again, self.expected(), strict=True)
        for name, is_wanted, one, other, right in every:
            if is_wanted and (one is None or other is None or not torch.equal(one, other)):
                self.problems.append(f"{name}: missing, or another result in a second call")
            elif is_wanted and one is not None and (error := self.error(one, right)) > 1:
                self.problems.append(f"{name}: {error:.3g} times as wrong as is allowed")
        return self.problems

    def error(self, out: Tensor, terms: Tensor) -> float:
        """How far a result is from the sum of its terms, of which there are several where it is the gradient of a broadcast tensor, at
        most, by how far it may be."""
        dtype = self.tokens.dtype
        right, sizes = terms.sum_to_size(out.shape), terms.abs().sum_to_size(out.shape)
        if dtype == torch.float16 and not bool(right.abs().max() < MOST):
            return 0
        of_largest = OFF[dtype.itemsize] + EPS[dtype] * (terms.shape != out.shape)
        allowed = EPS[dtype] * right.abs() + of_largest * sizes.max() + 1e-30
        return float(((widened(out) - right).abs() / allowed).nan_to_num(nan=math.inf).max())


def solved(scale: Tensor, shift: Tensor, against: bool) -> Tensor:
    """Along the last dimension, in as many steps as its size has bits."""
    if against:
        scale, shift = scale.flip(-1), shift.flip(-1)
    step = 1
    while step < shift.shape[-1]:
        more = scale[..., step:] * shift[..., :-step]
        shift = torch.cat([shift[..., :step], shift[..., step:] + more], -1)
        scale = torch.cat([scale[..., :step], scale[..., step:] * scale[..., :-step]], -1)
        step *= 2
    return shift.flip(-1) if against else shift


def placed(source: Random, value: Tensor) -> Tensor:
    """A copy, transposed and cut out of memory that is NaN, at any address."""
    if source.random() < 0.35:
        return value
    order = [*range(value.dim())]
    if source.random() < 0.5:
        source.shuffle(order)
    sizes = [value.shape[d] + source.choice((0, 0, 1, 8)) for d in order]
    offset = source.choice((0, 0, 1, 2, 3, 8))
    memory = torch.full(
        (offset + math.prod(sizes),), math.nan, dtype=value.dtype, device=value.device
    )
    view = memory[offset:].view(sizes).permute([order.index(d) for d in range(value.dim())])
    return view[tuple(map(slice, value.shape))].copy_(value)


def draw(number: int, device: str, elements: int) -> Call:
    """The call of a number."""
    source = Random(number)
    torch.manual_seed(number)
    dtype = source.choice((*EPS, torch.float32))
    shape = [source.choice((1, 1, 2, 3, 5, 8, 60)) for _ in range(source.choice((1, 2, 3, 3, 4)))]
    dim = source.randrange(len(shape))
    if source.random() < 0.7 and len(shape) > 1:
        dim, shape[-1] = source.randrange(len(shape) - 1), source.choice(CHANNELS)
    most = max(1, elements // (1 if source.random() < 0.3 else 16) // math.prod(shape) * shape[dim])
    edges = source.choice((1, 2, 5, 32, 33)) * source.choice((32, 64, 100)) + source.choice(
        (-1, 0, 1)
    )
    shape[dim] = size = source.choice(
        (source.randint(0, 3), int(most ** source.random()), most, min(most, edges))
    )
    bounds = None
    if source.random() < 0.35:
        cuts = [
            min(size, source.choice((source.randint(0, size), source.randrange(0, size + 1, 64))))
            for _ in range(source.choice((0, 1, 3, 40, 1000)))
        ]
        ends = [0] * source.choice((1, 1, 5)) + sorted(cuts) + [size] * source.choice((1, 1, 5))
        bounds = torch.tensor(ends, device=device, dtype=source.choice((torch.int32, torch.int64)))
    of_gates = [
        1 if n and source.random() < chance else n
        for chance in [source.choice((0, 0, 0.4))]
        for n in shape
    ]
    of_gates[dim] = 1 if size and source.random() < 0.25 else of_gates[dim]
    mixed = dtype.itemsize == 2 and source.random() < 0.2
    gates = 1 - torch.rand(of_gates, device=device, dtype=torch.float64) ** source.choice((1, 3))
    if dtype.is_complex:
        gates = torch.polar(gates, 6.28 * torch.rand_like(gates))
    of_state = [*shape]
    of_state[dim : dim + 1] = [] if bounds is None else [len(bounds) - 1]
    state_dtype = torch.float32 if dtype.itemsize == 2 else dtype

    def normal(sizes: list[int], dtype: torch.dtype) -> Tensor:
        return placed(source, torch.randn(sizes, dtype=dtype, device=device) / 8)

    return Call(
        placed(source, gates.to(torch.float32 if mixed else dtype)),
        normal(shape, dtype),
        normal(of_state, state_dtype) if source.random() < 0.5 else None,
        dim,
        source.random() < 0.4,
        bounds,
        (source.random() < 0.7, source.random() < 0.7, source.random() < 0.7),
        normal(shape, dtype),
        normal(of_state, state_dtype),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0, help="which calls are drawn")
    parser.add_argument("--case", type=int, help="the number of one call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    elements = 1 << 20 if options.device == "cuda" else 1 << 15
    number = first = options.seed * 10**6 if options.case is None else options.case
    end, wrong = time.monotonic() + options.seconds, 0
    while time.monotonic() < end and wrong < 20:
        call = None
        try:
            call = draw(number, options.device, elements)
            problems = call.check()
        except Exception:
            problems = [traceback.format_exc()]
        if problems:
            wrong += 1
            print(f"case {number}: {call}", *problems, sep="\n    ", flush=True)
        number += 1
        if options.case is not None:
            break
    print(f"{number - first} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
