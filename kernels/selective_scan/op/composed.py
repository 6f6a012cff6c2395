"""``selective_scan`` composed of ``linear_scan`` and operators of torch, a piece of time after the other.

This runs what no kernel takes: complex A, B and C that do not change with time, float64, and derivatives of
derivatives, forward mode and ``torch.func``. Within a piece all states of a channel are scanned at once, for which there
is memory for ``_PIECE`` numbers; from piece to piece a state is handed on. The values of ``cu_seqlens`` are read by no
one but the device, so that CUDA graphs can record a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options
from scan_registry.ops.recomputation import Pairs, gradients

#: Numbers of a piece, by whether it is on a GPU: so many that it is busy, or as many as its caches hold.
_PIECE = {True: 1 << 24, False: 1 << 18}
_SHORTEST = 16


class Terms(NamedTuple):
    """What the recurrence is made of, in the computation's dtype: δ and δ·u, (B, D, L); A; B and C as (B, G, 1, N, L),
    with 1 for B and L where they do not matter; the state before, with a dimension of sequences if they are packed."""

    sizes: Tensor
    scaled: Tensor
    A: Tensor
    inward: Tensor
    outward: Tensor
    initial: Tensor | None


class Packing(NamedTuple):
    """Of sequences along time: their bounds, the last steps, and whether there are any."""

    bounds: Tensor
    last: Tensor
    nonempty: Tensor


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """The output and the final state, of ``normalised`` arguments."""
    terms, packing = _terms(arguments, options), _packing(arguments)
    outputs: list[Tensor] = []
    carry = None if packing else terms.initial
    final = _before(terms, packing, arguments)
    for begin, end in _pieces(arguments):
        y, carry, reached = _piece(terms, packing, carry, begin, end, options)
        outputs.append(y)
        if packing is not None and reached is not None:
            final = torch.where(_within(packing, begin, end), reached, final)
        elif packing is None:
            final = carry
    y = torch.cat(outputs, -1) if outputs else torch.zeros_like(terms.sizes)
    return _finished(y, arguments), final


def backward(
    arguments: Arguments, options: Options, out_grad: Tensor | None, final_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients that are wanted, of all arguments but the bounds. They are differentiable themselves where
    derivatives are recorded; else there is memory for the graph of one piece only."""

    def recompute(leaves: list[Any], recorded: bool) -> Pairs:
        inputs = Arguments._make([*leaves, arguments.cu_seqlens])
        if recorded or arguments.u.numel() == 0:
            return zip(forward(inputs, options), (out_grad, final_grad), strict=True)
        return _by_pieces(inputs, options, out_grad, final_grad)

    return gradients(arguments.differentiable, wanted, recompute)


def _by_pieces(
    arguments: Arguments, options: Options, out_grad: Tensor | None, final_grad: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Tensors that are made of the arguments, and the gradients that reach them through the recurrence, which is walked
    back piece by piece."""
    terms, packing = _terms(arguments, options), _packing(arguments)
    leaves = Terms._make(None if t is None else t.detach() for t in terms)
    spans = _pieces(arguments)
    outputs, carries = _forth(leaves, packing, spans, options)
    y = torch.cat(outputs, -1).requires_grad_()
    out = _finished(y, arguments)
    y_grad = torch.zeros_like(y)
    if out_grad is not None:
        (y_grad,) = torch.autograd.grad(out, y, out_grad.to(out.dtype), retain_graph=True)
    grads = Terms._make(None if t is None else torch.zeros_like(t) for t in leaves)
    passed = None if packing else final_grad
    for (begin, end), entering in zip(reversed(spans), reversed(carries), strict=True):
        reaching = None
        if packing is not None and final_grad is not None:
            reaching = torch.where(_within(packing, begin, end), final_grad, 0)
        arriving = y_grad[..., begin:end], passed, reaching
        own_grads, passed = _back(leaves, packing, entering, begin, end, options, arriving)
        _gather(grads, own_grads, begin, end)
    if packing is None:
        grads = grads._replace(initial=passed)
    elif grads.initial is not None and final_grad is not None:
        left = torch.where(packing.nonempty[:, None, None], 0, final_grad)
        grads = grads._replace(initial=grads.initial + left)
    reached = [(t, g) for t, g in zip(terms, grads, strict=True) if t is not None]
    return [(out, out_grad), *reached]


@torch.no_grad()
def _forth(
    leaves: Terms, packing: Packing | None, spans: list[tuple[int, int]], options: Options
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The output of each piece, and the state that enters it."""
    outputs: list[Tensor] = []
    carries = [None if packing else leaves.initial]
    for begin, end in spans:
        y, carry, _ = _piece(leaves, packing, carries[-1], begin, end, options)
        outputs.append(y)
        carries.append(carry)
    return outputs, carries[:-1]


def _back(
    leaves: Terms,
    packing: Packing | None,
    entering: Tensor | None,
    begin: int,
    end: int,
    options: Options,
    arriving: tuple[Tensor | None, ...],
) -> tuple[Terms, Tensor | None]:
    """The gradients of a piece's terms, and of the state that enters it, from those that arrive at its ends."""
    inputs = _cut(leaves, begin, end)
    inputs = Terms._make(None if t is None else t.detach().requires_grad_() for t in inputs)
    carry = None if entering is None else entering.detach().requires_grad_()
    # What of the initial state is not in packed sequences is the first piece's carry.
    own = inputs if packing else inputs._replace(initial=None)
    ends = _piece(own, packing, carry, 0, end - begin, options, offset=begin)
    pairs = [(x, g) for x, g in zip(ends, arriving, strict=True) if x is not None and g is not None]
    outputs, output_grads = [x for x, _ in pairs], [g for _, g in pairs]
    sources = [t for t in (*own, carry) if t is not None]
    grads = iter(torch.autograd.grad(outputs, sources, output_grads, materialize_grads=True))
    own_grads = Terms._make(None if t is None else next(grads) for t in own)
    return own_grads, None if carry is None else next(grads)


def _cut(terms: Terms, begin: int, end: int) -> Terms:
    """Those of a piece; what does not change with time is whole."""
    inward, outward = (
        x if x.shape[-1] == 1 and terms.sizes.shape[-1] != 1 else x[..., begin:end]
        for x in (terms.inward, terms.outward)
    )
    sizes, scaled = (x[..., begin:end] for x in (terms.sizes, terms.scaled))
    return Terms(sizes, scaled, terms.A, inward, outward, terms.initial)


def _gather(grads: Terms, of_piece: Terms, begin: int, end: int) -> None:
    """Add a piece's gradients to those of the whole."""
    whole = _cut(grads, begin, end)
    for total, grad in zip(whole, of_piece, strict=True):
        if total is not None and grad is not None:
            total.add_(grad)


# --- Pieces -----------------------------------------------------------------------------------


def _pieces(arguments: Arguments) -> list[tuple[int, int]]:
    batch, channels, time = arguments.u.shape
    steps_that_fit = _PIECE[arguments.u.is_cuda] // max(1, batch * channels * arguments.A.shape[1])
    steps = max(_SHORTEST, steps_that_fit)
    return [(begin, min(time, begin + steps)) for begin in range(0, time, steps)]


def _terms(arguments: Arguments, options: Options) -> Terms:
    compute = reference.compute_dtype(arguments.u.dtype)
    of_states = reference.state_dtype(arguments.u.dtype, arguments.A.dtype)
    delta = arguments.delta.to(compute)
    sizes = reference.step_sizes(delta, arguments.delta_bias, options.softplus)

    def projection(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.to(of_states)[None, :, None, :, None]
        if of_states.is_complex:
            x = reference.from_pairs(x.to(compute))
        return x.to(of_states).unsqueeze(2)

    initial = arguments.initial_state
    return Terms(
        sizes,
        sizes * arguments.u.to(compute),
        arguments.A.to(of_states),
        projection(arguments.B),
        projection(arguments.C),
        None if initial is None else initial.to(of_states),
    )


def _packing(arguments: Arguments) -> Packing | None:
    cu_seqlens = arguments.cu_seqlens
    if cu_seqlens is None:
        return None
    return Packing(cu_seqlens, cu_seqlens[1:] - 1, cu_seqlens[1:] > cu_seqlens[:-1])


def _before(terms: Terms, packing: Packing | None, arguments: Arguments) -> Tensor:
    """The state before all, zeros if there is none."""
    if terms.initial is not None:
        return terms.initial
    between = () if packing is None else (packing.last.shape[0],)
    return terms.A.new_zeros(arguments.u.shape[0], *between, *terms.A.shape)


def _within(packing: Packing, begin: int, end: int) -> Tensor:
    """Of each sequence, whether it ends in a piece; (S, 1, 1)."""
    ends = packing.nonempty & (packing.last >= begin) & (packing.last < end)
    return ends[:, None, None]


def _entering(terms: Terms, packing: Packing, carry: Tensor | None, start: int) -> Tensor | None:
    """The state before each sequence, or before its steps from ``start`` on; None for zeros."""
    if carry is None:
        return terms.initial
    begun = (packing.bounds[:-1] < start)[:, None, None]
    before: Any = 0 if terms.initial is None else terms.initial
    return torch.where(begun, carry.unsqueeze(1), before)


def _piece(
    terms: Terms,
    packing: Packing | None,
    carry: Tensor | None,
    begin: int,
    end: int,
    options: Options,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Σ C·h of one piece, the state after it, and if sequences are packed the state after each, where that is in the
    piece. ``terms`` start ``offset`` steps later than ``packing`` does."""
    part = _cut(terms, begin, end)
    sizes, scaled = part.sizes, part.scaled
    gates = torch.exp(sizes.unsqueeze(2) * part.A.unsqueeze(-1))
    groups = part.inward.shape[1]
    tokens = (scaled.unflatten(1, (groups, -1)).unsqueeze(3) * part.inward).flatten(1, 2)
    wide = gates.dtype == torch.complex128 and gates.is_cuda  # which linear_scan has no kernel for
    backend: Any = "reference" if wide or options.backend == "reference" else "auto"
    reached = None
    if packing is None:
        states, carry = linear_scan(gates, tokens, carry, return_final_state=True, backend=backend)
    else:
        # Each starts anew, whatever the state before it: a gate of zero would hand on what is not finite.
        start = offset + begin
        entering = _entering(part, packing, carry, start)
        states, finals = linear_scan(
            *(gates, tokens, None if entering is None else entering.permute(0, 2, 3, 1)),
            cu_seqlens=(packing.bounds - start).clamp(0, end - begin),
            return_final_state=True,
            backend=backend,
        )
        carry, reached = states[..., -1], finals.permute(0, 3, 1, 2)
    groups = part.outward.shape[1]
    y = (states.unflatten(1, (groups, -1)) * part.outward).sum(3).flatten(1, 2)
    return 2 * y.real if y.is_complex() else y, carry, reached


def _finished(y: Tensor, arguments: Arguments) -> Tensor:
    """The output, in the dtype of ``u``."""
    if arguments.D is not None:
        y = y + arguments.D.to(y.dtype).unsqueeze(-1) * arguments.u.to(y.dtype)
    if arguments.z is not None:
        y = y * functional.silu(arguments.z.to(y.dtype))
    return y.to(arguments.u.dtype)
