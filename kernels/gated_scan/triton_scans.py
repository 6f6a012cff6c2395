"""Scans of tiles whose states may start anew, and those of backward passes, for the Triton kernels of gated_scan.

Forward, a step is the affine map h -> gate * h + token, and maps compose as in linear_scan. Backward, h is the gradient
that reaches a state from later steps, and a step does two things:

    adjoint = h + grad            of its own state, which gradients of gate and token follow from
    h       = gate * adjoint      of the state before it

so that no gate of another step is needed. A run of such steps is the map of h to its last adjoint, scale * h + shift,
and the gate of its last step.

Where ANEW, a scale of 0 forgets what it is a factor of, even an infinity or NaN. Scales of states that are stored in 32
bits have error terms, as in linear_scan: ``bits`` are those of an element in which states are stored.
"""

# ruff: noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)

import triton
import triton.language as tl

from scan_registry.kernels.linear_scan.triton_tiles import (
    compose,
    compose_compensated,
    exact_product,
    exactly_applied,
)

# --- Forward ------------------------------------------------------------------------------------


@triton.jit
def compose_anew(first_scale, first_shift, second_scale, second_shift):
    scale, shift = compose(first_scale, first_shift, second_scale, second_shift)
    anew = second_scale == 0
    return tl.where(anew, 0.0, scale), tl.where(anew, second_shift, shift)


@triton.jit
def compose_compensated_anew(
    first_scale, first_error, first_shift, second_scale, second_error, second_shift
):
    scale, error, shift = compose_compensated(
        first_scale, first_error, first_shift, second_scale, second_error, second_shift
    )
    anew = second_scale == 0
    return (
        tl.where(anew, 0.0, scale),
        tl.where(anew, 0.0, error),
        tl.where(anew, second_shift, shift),
    )


@triton.jit
def scan_maps(gate, token, axis: tl.constexpr, bits: tl.constexpr, ANEW: tl.constexpr):
    """The composed maps of a tile up to each of its steps: scale, its error term, shift."""
    if bits < 32:
        if ANEW:
            scale, shift = tl.associative_scan((gate, token), axis, compose_anew)
        else:
            scale, shift = tl.associative_scan((gate, token), axis, compose)
        return scale, tl.zeros_like(scale), shift
    else:
        maps = (gate, tl.zeros_like(gate), token)
        if ANEW:
            return tl.associative_scan(maps, axis, compose_compensated_anew)
        else:
            return tl.associative_scan(maps, axis, compose_compensated)


@triton.jit
def then_apply(first_scale, first_shift, second_scale, second_shift):
    return first_scale * second_scale, tl.fma(second_scale, first_shift, second_shift)


@triton.jit
def then_apply_anew(first_scale, first_shift, second_scale, second_shift):
    anew = second_scale == 0
    scale, shift = then_apply(first_scale, first_shift, second_scale, second_shift)
    return tl.where(anew, 0.0, scale), tl.where(anew, second_shift, shift)


@triton.jit
def states_of_steps(gate, token, axis: tl.constexpr, ANEW: tl.constexpr):
    """The states of steps whose first token holds what enters them."""
    if ANEW:
        return tl.associative_scan((gate, token), axis, then_apply_anew)[1]
    else:
        return tl.associative_scan((gate, token), axis, then_apply)[1]


# --- Backward -----------------------------------------------------------------------------------


@triton.jit
def compose_adjoints(
    first_scale, first_shift, first_gate, second_scale, second_shift, second_gate
):
    factor = second_scale * first_gate
    return factor * first_scale, tl.fma(factor, first_shift, second_shift), second_gate


@triton.jit
def compose_adjoints_anew(
    first_scale, first_shift, first_gate, second_scale, second_shift, second_gate
):
    factor = second_scale * first_gate
    anew = (first_gate == 0) | (factor == 0)
    scale, shift = factor * first_scale, tl.fma(factor, first_shift, second_shift)
    return tl.where(anew, 0.0, scale), tl.where(anew, second_shift, shift), second_gate


@triton.jit
def compose_adjoints_compensated(
    first_scale, first_error, first_shift, first_gate,
    second_scale, second_error, second_shift, second_gate,
):  # fmt: skip
    factor, error = exact_product(second_scale, first_gate)
    factor_error = tl.fma(second_error, first_gate, error)
    scale, error = exact_product(factor, first_scale)
    error_term = tl.fma(factor_error, first_scale, tl.fma(factor, first_error, error))
    small = tl.fma(factor_error, first_shift, second_shift)
    return scale, error_term, tl.fma(factor, first_shift, small), second_gate


@triton.jit
def compose_adjoints_compensated_anew(
    first_scale, first_error, first_shift, first_gate,
    second_scale, second_error, second_shift, second_gate,
):  # fmt: skip
    scale, error, shift, gate = compose_adjoints_compensated(
        first_scale, first_error, first_shift, first_gate,
        second_scale, second_error, second_shift, second_gate,
    )  # fmt: skip
    anew = (first_gate == 0) | (second_scale * first_gate == 0)
    return (
        tl.where(anew, 0.0, scale),
        tl.where(anew, 0.0, error),
        tl.where(anew, second_shift, shift),
        gate,
    )


@triton.jit
def scan_adjoints(gate, grad, axis: tl.constexpr, bits: tl.constexpr, ANEW: tl.constexpr):
    """The maps of what enters a tile to the adjoint of each of its steps: scale, its error term, shift."""
    ones = tl.full(gate.shape, 1.0, gate.dtype)
    if bits < 32:
        maps = (ones, grad, gate)
        if ANEW:
            scale, shift, _ = tl.associative_scan(maps, axis, compose_adjoints_anew)
        else:
            scale, shift, _ = tl.associative_scan(maps, axis, compose_adjoints)
        return scale, tl.zeros_like(scale), shift
    else:
        maps = (ones, tl.zeros_like(gate), grad, gate)
        if ANEW:
            maps = tl.associative_scan(maps, axis, compose_adjoints_compensated_anew)
        else:
            maps = tl.associative_scan(maps, axis, compose_adjoints_compensated)
        return maps[0], maps[1], maps[2]


@triton.jit
def adjoints_of_steps(gate, grad, axis: tl.constexpr, ANEW: tl.constexpr):
    """The adjoints of steps whose first gradient holds what enters them."""
    maps = (tl.full(gate.shape, 1.0, gate.dtype), grad, gate)
    if ANEW:
        return tl.associative_scan(maps, axis, compose_adjoints_anew)[1]
    else:
        return tl.associative_scan(maps, axis, compose_adjoints)[1]


@triton.jit
def through_gate(gate, scale, error_term, shift, bits: tl.constexpr, ANEW: tl.constexpr):
    """The map to what leaves a step, from that to its adjoint."""
    if bits < 32:
        product, error = gate * scale, error_term
    else:
        product, error = exact_product(gate, scale)
        error = tl.fma(gate, error_term, error)
    shift = gate * shift
    if ANEW:
        anew = gate == 0
        product = tl.where(anew, 0.0, product)
        error = tl.where(anew, 0.0, error)
        shift = tl.where(anew, 0.0, shift)
    return product, error, shift


# --- Both ---------------------------------------------------------------------------------------


@triton.jit
def applied(scale, error_term, shift, x, bits: tl.constexpr, ANEW: tl.constexpr):
    """(scale + error_term) * x + shift."""
    if bits < 32:
        result = tl.fma(scale, x, shift)
    else:
        result = tl.fma(scale, x, tl.fma(error_term, x, shift))
    return tl.where(scale == 0, shift, result) if ANEW else result


@triton.jit
def carried(scale, error_term, shift, x, x_error, bits: tl.constexpr, ANEW: tl.constexpr):
    """The same of a state that goes from tile to tile with its error term."""
    if bits < 32:
        return applied(scale, error_term, shift, x, bits, ANEW), x_error
    else:
        after, error = exactly_applied((scale,), (error_term,), (shift,), (x,), (x_error,))
        if ANEW:
            return tl.where(scale == 0, shift, after[0]), tl.where(scale == 0, 0.0, error[0])
        else:
            return after[0], error[0]
