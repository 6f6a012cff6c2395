"""Scans of tiles whose states may start anew, forward and backward, for the Triton kernels of gated_scan.

Forward, a step is the affine map h -> gate * h + token, and maps compose as in linear_scan. Backward, h is the gradient
that reaches a state from later steps, and a step does two things:

    adjoint = h + grad            of its own state, which gradients of gate and token follow from
    h       = gate * adjoint      of the state before it

so that no gate of another step is needed. A run of such steps is the map of h to its last adjoint, scale * h + shift,
and the gate of its last step.

A scale of 0 forgets what it is a factor of, even an infinity or NaN: where a state starts anew, the gate is 0. Scales of
states that are stored in 32 bits have error terms, as in linear_scan: ``bits`` are those of an element in which states are
stored.
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
def scan_maps(gate, token, axis: tl.constexpr, bits: tl.constexpr):
    """The composed maps of a tile up to each of its steps: scale, its error term, shift."""
    if bits < 32:
        scale, shift = tl.associative_scan((gate, token), axis, compose_anew)
        return scale, tl.zeros_like(scale), shift
    else:
        maps = (gate, tl.zeros_like(gate), token)
        return tl.associative_scan(maps, axis, compose_compensated_anew)


@triton.jit
def then_apply(first_scale, first_shift, second_scale, second_shift):
    anew = second_scale == 0
    shift = tl.fma(second_scale, first_shift, second_shift)
    return (
        tl.where(anew, 0.0, first_scale * second_scale),
        tl.where(anew, second_shift, shift),
    )


@triton.jit
def states_of_steps(gate, token, axis: tl.constexpr):
    """The states of steps whose first token holds what enters them."""
    return tl.associative_scan((gate, token), axis, then_apply)[1]


# --- Backward -----------------------------------------------------------------------------------


@triton.jit
def compose_adjoints(first_scale, first_shift, first_gate, second_scale, second_shift, second_gate):
    factor = second_scale * first_gate
    anew = factor == 0
    scale, shift = factor * first_scale, tl.fma(factor, first_shift, second_shift)
    return tl.where(anew, 0.0, scale), tl.where(anew, second_shift, shift), second_gate


@triton.jit
def compose_adjoints_compensated(
    first_scale, first_error, first_shift, first_gate,
    second_scale, second_error, second_shift, second_gate,
):  # fmt: skip
    factor, error = exact_product(second_scale, first_gate)
    anew = factor == 0
    factor_error = tl.fma(second_error, first_gate, error)
    scale, error = exact_product(factor, first_scale)
    error_term = tl.fma(factor_error, first_scale, tl.fma(factor, first_error, error))
    shift = tl.fma(factor, first_shift, tl.fma(factor_error, first_shift, second_shift))
    return (
        tl.where(anew, 0.0, scale),
        tl.where(anew, 0.0, error_term),
        tl.where(anew, second_shift, shift),
        second_gate,
    )


@triton.jit
def scan_adjoints(gate, grad, axis: tl.constexpr, bits: tl.constexpr):
    """The maps of what enters a tile to the adjoint of each of its steps: scale, its error term, shift."""
    ones = tl.full(gate.shape, 1.0, gate.dtype)
    if bits < 32:
        scale, shift, _ = tl.associative_scan((ones, grad, gate), axis, compose_adjoints)
        return scale, tl.zeros_like(scale), shift
    else:
        maps = (ones, tl.zeros_like(gate), grad, gate)
        maps = tl.associative_scan(maps, axis, compose_adjoints_compensated)
        return maps[0], maps[1], maps[2]


@triton.jit
def adjoints_of_steps(gate, grad, axis: tl.constexpr):
    """The adjoints of steps whose first gradient holds what enters them."""
    maps = (tl.full(gate.shape, 1.0, gate.dtype), grad, gate)
    return tl.associative_scan(maps, axis, compose_adjoints)[1]


@triton.jit
def through_gate(gate, scale, error_term, shift, bits: tl.constexpr):
    """The map to what leaves a step, from that to its adjoint."""
    if bits < 32:
        product, error = gate * scale, error_term
    else:
        product, error = exact_product(gate, scale)
        error = tl.fma(gate, error_term, error)
    anew = gate == 0
    return (
        tl.where(anew, 0.0, product),
        tl.where(anew, 0.0, error),
        tl.where(anew, 0.0, gate * shift),
    )


# --- Both ---------------------------------------------------------------------------------------


@triton.jit
def applied(scale, error_term, shift, x, bits: tl.constexpr):
    """(scale + error_term) * x + shift."""
    if bits < 32:
        result = tl.fma(scale, x, shift)
    else:
        result = tl.fma(scale, x, tl.fma(error_term, x, shift))
    return tl.where(scale == 0, shift, result)


@triton.jit
def carried(scale, error_term, shift, x, x_error, bits: tl.constexpr):
    """The same of a state that goes from tile to tile with its error term."""
    if bits < 32:
        return applied(scale, error_term, shift, x, bits), x_error
    else:
        after, error = exactly_applied((scale,), (error_term,), (shift,), (x,), (x_error,))
        return tl.where(scale == 0, shift, after[0]), tl.where(scale == 0, 0.0, error[0])
